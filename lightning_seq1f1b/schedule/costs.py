"""FLOPs of a causal language model's layers and head for a chunk of a row, and how many layers a stage should get."""

from __future__ import annotations

from dataclasses import dataclass

# Multiples of the forward's FLOPs that forward and backward take together. Backward of a matrix product is two
# products. Backward of attention is five products against the forward's two, as the scores are computed again.
_TRAIN_LINEAR = 3.0
_TRAIN_ATTENTION = 3.5


@dataclass(frozen=True)
class ModelShape:
    """The numbers of an architecture that decide its FLOPs.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; fewer than `num_heads` under grouped-query attention.
        head_dim: width of one head.
        intermediate_size: inner width of the MLP.
        gated_mlp: whether the MLP has three matrices (gate, up, down), or two.
        vocab_size: rows of the LM head.
        sliding_window: tokens that a query sees, itself included; None when it sees all before it.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    gated_mlp: bool
    vocab_size: int
    sliding_window: int | None = None


def attended_pairs(start: int, stop: int, sliding_window: int | None = None) -> float:
    """Query-key pairs that causal attention of tokens `start` to `stop` computes, the prefix included.

    For a chunk of s tokens that ends at token P this is s P - s^2 / 2, the pairs of a query with itself counted half;
    with a window, pairs further apart than the window do not count.
    """
    return _pairs_of_prefix(stop, sliding_window) - _pairs_of_prefix(start, sliding_window)


def _pairs_of_prefix(length: int, sliding_window: int | None) -> float:
    seen = length if sliding_window is None else min(length, sliding_window)
    return seen * seen / 2 + (length - seen) * seen


def layer_flops(shape: ModelShape, start: int, stop: int, *, training: bool = True) -> float:
    """FLOPs of one decoder layer for tokens `start` to `stop` of one row; a multiply-add counts as two.

    Per token 4 h (n + n_kv) d for the query, output, key and value projections and 2 h f for each matrix of the MLP;
    per query-key pair 4 n d for the scores and the weighted sum. Norms, rotary embeddings and softmax are left out.

    Args:
        shape: the architecture.
        start: first token of the chunk.
        stop: end of the chunk.
        training: whether backward counts too: the linear part three times, the attention three and a half times.
    """
    projections = 4 * shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    mlp = (6 if shape.gated_mlp else 4) * shape.hidden_size * shape.intermediate_size
    linear = (projections + mlp) * (stop - start)
    attention = 4 * shape.num_heads * shape.head_dim * attended_pairs(start, stop, shape.sliding_window)
    return _TRAIN_LINEAR * linear + _TRAIN_ATTENTION * attention if training else linear + attention


def head_flops(shape: ModelShape, start: int, stop: int, *, training: bool = True) -> float:
    """FLOPs of the LM head for tokens `start` to `stop` of one row: 2 h V per token, three times that in training."""
    forward = 2 * shape.hidden_size * shape.vocab_size * (stop - start)
    return _TRAIN_LINEAR * forward if training else forward


def layers_per_stage(shape: ModelShape, num_stages: int, length: int) -> tuple[int, ...]:
    """How many layers each stage gets, so that the slowest stage is as fast as it can be.

    The last stage also runs the LM head, so it gets fewer layers where the vocabulary is large. Among equally good
    splits the last stage gets the most layers, and what does not divide goes to later stages, because the earlier a
    stage, the more units it holds in memory.

    Args:
        shape: the architecture.
        num_stages: stages to fill, each with at least one layer.
        length: tokens of a row, which weigh the head against the layers.

    Raises:
        ValueError: if there are more stages than layers.
    """
    if not 1 <= num_stages <= shape.num_layers:
        raise ValueError(
            f"{shape.num_layers} layers cannot fill {num_stages} stages with at least one layer each; "
            f"set num_stages between 1 and {shape.num_layers}"
        )
    if num_stages == 1:
        return (shape.num_layers,)
    layer, head = layer_flops(shape, 0, length), head_flops(shape, 0, length)
    others = num_stages - 1

    def slowest(last: int) -> float:
        most = -(-(shape.num_layers - last) // others)
        return max(most * layer, last * layer + head)

    last = min(range(shape.num_layers - others, 0, -1), key=slowest)
    few, extra = divmod(shape.num_layers - last, others)
    return (few,) * (others - extra) + (few + 1,) * extra + (last,)
