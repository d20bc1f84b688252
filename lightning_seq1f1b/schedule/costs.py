"""What a causal language model costs: FLOPs of its layers and head for a chunk of a row, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ATTENTION_BACKWARD = 2.5
"""Backward of attention against its forward: five products against two, as the scores are computed again."""


@dataclass(frozen=True)
class LayerShape:
    """The numbers of one decoder layer that decide its FLOPs and its memory.

    Attributes:
        matrices: weights that one token is multiplied with; of experts, only those that it is sent to.
        parameters: weights of all its matrices.
        pair_width: multiply-adds of a query with one key and its value, over all heads: n (d + d_v).
        kv_width: elements of the keys and values of one token: n_kv (d + d_v).
        heads: query heads.
        linear_inputs: elements for each token that its linear layers read, what several read counted once.
        linear_outputs: elements for each token that its linear layers give.
        saved: elements for each token that autograd keeps in the activations' dtype, without keys and values.
        saved_wide: elements for each token that it keeps in float32 at least.
        window: tokens that a query sees, itself included; None when it sees all before it, 0 for a layer that keeps no
            keys.
        joint_matrices: those of `matrices` whose gradients come with the input's and cannot wait for later, as they are
            in no linear layer: tensors of all experts.
    """

    matrices: int
    parameters: int
    pair_width: int
    kv_width: int
    heads: int
    linear_inputs: int
    linear_outputs: int
    saved: int
    saved_wide: int
    window: int | None = None
    joint_matrices: int = 0


@dataclass(frozen=True)
class ModelShape:
    """The numbers of an architecture that decide its FLOPs and its memory.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; fewer than `num_heads` under grouped-query attention.
        head_dim: width of a query and a key.
        intermediate_size: inner width of the MLP, and of the shared experts where there are experts.
        gated_mlp: whether the MLP has three matrices (gate, up, down), or two.
        vocab_size: rows of the LM head.
        sliding_window: tokens that a query sees, itself included; None when it sees all before it.
        value_head_dim: width of a value; None when it is `head_dim`.
        num_experts: routed experts of a layer; 0 for a plain MLP.
        experts_per_token: routed experts that a token is sent to.
        expert_size: inner width of one routed expert.
        tied_embeddings: whether the LM head is the embedding.
        layers: every layer, when they differ from each other or from what the numbers above say; empty otherwise.
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
    value_head_dim: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    tied_embeddings: bool = False
    layers: tuple[LayerShape, ...] = ()

    def __post_init__(self) -> None:
        """Refuse layers that are not as many as there are.

        Raises:
            ValueError: if `layers` is given and has another length than `num_layers`.
        """
        if self.layers and len(self.layers) != self.num_layers:
            raise ValueError(f"a shape of {self.num_layers} layers describes {len(self.layers)} of them")

    def layer(self, index: int) -> LayerShape:
        """One layer; `index` counts from 0."""
        return self.layers[index] if self.layers else self._uniform

    @cached_property
    def _uniform(self) -> LayerShape:
        return uniform_layer(self)


def uniform_layer(shape: ModelShape) -> LayerShape:
    """The layer that the sizes of a shape describe: attention, and an MLP or experts, each behind a norm.

    What autograd keeps is that of transformers' code in this package's runtime. Of an RMS norm, which gated MLPs come
    with: its input in float32, what its weight multiplies, and its output, which linear layers read; of a layer norm
    input and output. Of attention: rotated queries, the output, and the log-sum-exp of every head. Of the MLP: every
    result in it. Of experts beside that: a copy of the input and of the output for every expert a token is sent to.
    """
    hidden, inner, parts = shape.hidden_size, shape.intermediate_size, 2 if shape.gated_mlp else 1
    value_dim = shape.value_head_dim or shape.head_dim
    queries, values = shape.num_heads * shape.head_dim, shape.num_heads * value_dim
    kv_width = shape.num_kv_heads * (shape.head_dim + value_dim)
    projections = hidden * (queries + kv_width + values)
    routed, sent = shape.experts_per_token * shape.expert_size, shape.experts_per_token * hidden
    router = hidden * shape.num_experts
    expert = (parts + 1) * hidden
    mlp_ends = hidden if inner else 0
    # RMS norms keep their input in float32 and a factor for each token, layer norms two.
    norm_wide = hidden + 1 if shape.gated_mlp else 2
    return LayerShape(
        matrices=projections + expert * (inner + routed) + router,
        parameters=projections + expert * (inner + shape.num_experts * shape.expert_size) + router,
        pair_width=queries + values,
        kv_width=kv_width,
        heads=shape.num_heads,
        linear_inputs=hidden + values + mlp_ends + inner,
        linear_outputs=queries + kv_width + hidden + mlp_ends + parts * inner,
        saved=4 * hidden + queries + values + 2 * parts * (inner + routed) + 2 * sent,
        saved_wide=2 * norm_wide + shape.num_heads + shape.num_experts,
        window=shape.sliding_window,
        joint_matrices=expert * routed + router,
    )


@dataclass(frozen=True)
class Flops:
    """FLOPs of one forward; a multiply-add counts as two.

    Attributes:
        linear: of matrix products with weights. Their backward takes as much for the input's gradient, and as much for
            the weights'.
        attention: of scores and weighted sums. Their backward takes two and a half times as much.
        joint: the part of `linear` whose weights' gradients come with the input's, see `LayerShape.joint_matrices`.
    """

    linear: float = 0.0
    attention: float = 0.0
    joint: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        """The sum, part by part."""
        return Flops(self.linear + other.linear, self.attention + other.attention, self.joint + other.joint)

    def times(self, number: int) -> Flops:
        """That of several alike."""
        return Flops(number * self.linear, number * self.attention, number * self.joint)

    @property
    def forward(self) -> float:
        """FLOPs of the forward."""
        return self.linear + self.attention

    @property
    def input_grad(self) -> float:
        """FLOPs of the backward without the weights' gradients that can wait."""
        return self.linear + self.joint + ATTENTION_BACKWARD * self.attention

    @property
    def weight_grad(self) -> float:
        """FLOPs of the weights' gradients that can wait, when all weights are trained."""
        return self.linear - self.joint

    @property
    def training(self) -> float:
        """FLOPs of forward and backward."""
        return self.forward + self.input_grad + self.weight_grad


def attended_pairs(start: int, stop: int, sliding_window: int | None = None) -> float:
    """Query-key pairs that causal attention of tokens `start` to `stop` computes, the prefix included.

    For a chunk of s tokens that ends at token P this is s P - s^2 / 2, the pairs of a query with itself counted half;
    with a window, pairs further apart than the window do not count.
    """
    return _pairs_of_prefix(stop, sliding_window) - _pairs_of_prefix(start, sliding_window)


def _pairs_of_prefix(length: int, sliding_window: int | None) -> float:
    seen = length if sliding_window is None else min(length, sliding_window)
    return seen * seen / 2 + (length - seen) * seen


def flops_of_layer(layer: LayerShape, start: int, stop: int) -> Flops:
    """FLOPs of one decoder layer for tokens `start` to `stop` of one row.

    Two for each weight and token, and two for each multiply-add of a query-key pair. Norms, rotary embeddings and
    softmax are left out.
    """
    pairs = attended_pairs(start, stop, layer.window)
    tokens = 2.0 * (stop - start)
    return Flops(tokens * layer.matrices, 2.0 * layer.pair_width * pairs, tokens * layer.joint_matrices)


def alike(shape: ModelShape, layers: Sequence[int]) -> dict[LayerShape, int]:
    """How many of the layers with these indices have which shape."""
    if not shape.layers:
        return {shape.layer(0): len(layers)} if layers else {}
    return Counter(map(shape.layer, layers))


def flops_of_layers(shape: ModelShape, layers: Sequence[int], start: int, stop: int) -> Flops:
    """FLOPs of the layers with these indices for tokens `start` to `stop` of one row."""
    kinds = alike(shape, layers).items()
    return sum((flops_of_layer(layer, start, stop).times(count) for layer, count in kinds), Flops())


def flops_of_head(shape: ModelShape, start: int, stop: int) -> Flops:
    """FLOPs of the LM head for tokens `start` to `stop` of one row: 2 h V for each token."""
    return Flops(2.0 * shape.hidden_size * shape.vocab_size * (stop - start))


@dataclass(frozen=True)
class PartCosts:
    """Cost of the parts of a model, in any unit.

    Attributes:
        layers: of every decoder layer.
        embedding: of what runs before the layers.
        head: of what runs after them.
    """

    layers: tuple[float, ...]
    embedding: float = 0.0
    head: float = 0.0


def part_flops(shape: ModelShape, length: int) -> PartCosts:
    """FLOPs of forward and backward of every layer, and of the head, for one row of `length` tokens."""
    layers = tuple(flops_of_layer(shape.layer(index), 0, length).training for index in range(shape.num_layers))
    return PartCosts(layers, 0.0, flops_of_head(shape, 0, length).training)


def layer_flops(shape: ModelShape, start: int, stop: int, *, training: bool = True) -> float:
    """FLOPs of a decoder layer for tokens `start` to `stop` of one row, the mean over all layers.

    Args:
        shape: the architecture.
        start: first token of the chunk.
        stop: end of the chunk.
        training: whether backward counts too: the linear part three times, the attention three and a half times.
    """
    flops = flops_of_layers(shape, range(shape.num_layers), start, stop)
    return (flops.training if training else flops.forward) / shape.num_layers


def head_flops(shape: ModelShape, start: int, stop: int, *, training: bool = True) -> float:
    """FLOPs of the LM head for tokens `start` to `stop` of one row: 2 h V per token, three times that in training."""
    flops = flops_of_head(shape, start, stop)
    return flops.training if training else flops.forward
