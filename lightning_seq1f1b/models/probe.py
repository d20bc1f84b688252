"""What a model is made of, learned from a trial run without memory before anything is cut or computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_seq1f1b.models.own_loss import check_loss_function
from lightning_seq1f1b.models.requirements import check_causal_lm
from lightning_seq1f1b.models.trunk import find_trunk
from lightning_seq1f1b.models.without_memory import meta_copy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightning_seq1f1b.models.trial_run import LayerRecord, TrialRecord


@dataclass(frozen=True)
class Probe:
    """What the stages of a model need to know about it.

    Attributes:
        before: full names of the modules beside the layers that run before the first layer; all others run after.
        layer_outputs: None where layers return a tensor, else the length of the tuple they return.
        attention: the attention implementation to run with: ours, or the model's own choice where its layers compute
            attention themselves and need filled masks.
        uncuttable: why the model cannot be cut between its layers; None when it can.
        unpackable: why it cannot keep documents apart that are packed into one row; None when it can.
    """

    before: frozenset[str]
    layer_outputs: int | None
    attention: str
    uncuttable: str | None
    unpackable: str | None


def probe(model: PreTrainedModel) -> Probe:
    """Run a copy of the model on the meta device.

    Raises:
        ValueError: the model can't be run chunk by chunk; the message says why.
    """
    from lightning_seq1f1b.models import attention, trial_run

    check_causal_lm(model)
    chosen = attention.NAME
    record = trial_run.trial_run(find_trunk(meta_copy(model)), trial_run.NAME)
    if record.error is not None or any(_unusual(layer) for layer in record.layers.values()):
        # Its layers attend on their own, or look into masks, and may need those that transformers fills for them.
        own = trial_run.trial_run(find_trunk(meta_copy(model)), model.config._attn_implementation)
        if own.error is None or record.error is not None:
            chosen, record = model.config._attn_implementation, own
    _check_run(model, record)
    _check_cache(model, record)
    _check_state(model, record)
    _check_loss(model, record)
    return Probe(
        before=frozenset(record.before),
        layer_outputs=_layer_outputs(model, record),
        attention=chosen,
        uncuttable=_uncuttable(record),
        unpackable=_unpackable(model, record),
    )


def _unusual(layer: LayerRecord) -> bool:
    """Whether a layer did not run to its end, attended past the attention interface, or told it what ours ignores."""
    attention = layer.attention
    return layer.error is not None or (layer.wrote_keys if attention is None else bool(attention.unknown))


def _check_run(model: PreTrainedModel, record: TrialRecord) -> None:
    name = type(model).__name__
    if record.error is not None:
        raise ValueError(
            f"{name} can't be run chunk by chunk: a trial run on the meta device ended with "
            f"{type(record.error).__name__}: {record.error}"
        ) from record.error
    count = len(find_trunk(model).layers)
    if record.calls != list(range(count)):
        raise ValueError(
            f"{name} runs its {count} layers in the order {record.calls}; only models that run each layer once, in "
            "order, can be run chunk by chunk"
        )


def _check_cache(model: PreTrainedModel, record: TrialRecord) -> None:
    from lightning_seq1f1b.models.trial_run import CHUNKS

    name = type(model).__name__
    layers = sorted(record.layers.items())
    ahead = [index for index, layer in layers if layer.attention is not None and layer.attention.sees_ahead]
    if ahead:
        raise ValueError(
            f"layers {_listed(ahead)} of {name} let a token see later ones; only causal models can be run chunk by "
            "chunk"
        )
    writes = any(layer.wrote_keys or layer.wrote_state for _, layer in layers)
    error = next((layer.error for _, layer in layers if layer.error is not None), None)
    if not writes and error is not None:
        raise ValueError(
            f"whether the layers of {name} use the cache could not be found out: on the meta device they raise "
            f"{type(error).__name__}: {error}"
        ) from error
    ignoring = [
        index
        for index, layer in layers
        if not layer.wrote_keys and layer.attention is not None and layer.attention.keys <= CHUNKS[-1].length
    ]
    if ignoring or not writes:
        raise ValueError(
            f"the layers of {name} ignore the cache (layers {_listed(ignoring or [index for index, _ in layers])}): "
            "they attend to a chunk's own tokens only. To be run chunk by chunk, attention must call "
            "cache.update(keys, values, layer_idx) and attend to what it returns."
        )


def _check_state(model: PreTrainedModel, record: TrialRecord) -> None:
    name, layers = type(model).__name__, sorted(record.layers.items())
    if record.leaks:
        raise ValueError(
            f"{name} keeps what a chunk leaves for the next one in objects of its own, past the methods of the cache; "
            "its gradient could not be carried. Recurrent states must go through cache.update_recurrent_state"
        )
    scanning = [(index, layer) for index, layer in layers if layer.error is None and layer.wrote_recurrence]
    forgetful = [index for index, layer in scanning if not layer.goes_on]
    if forgetful:
        raise ValueError(
            f"layers {_listed(forgetful)} of {name} scan a chunk from an empty state: they leave their state to the "
            "cache, but go on from it in generation only, token by token"
        )
    for index, layer in layers:
        seen = layer.attention
        if layer.window is not None and seen is not None and seen.described and seen.window is None:
            raise ValueError(
                f"layer {index} of {name} attends to all tokens, but its cache keeps {layer.window} only "
                "(config.sliding_window): what it computes depends on the use of a cache"
            )


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices))


def _check_loss(model: PreTrainedModel, record: TrialRecord) -> None:
    given = record.loss_arguments
    if given is None or given.get("shift_labels") is None or given.get("num_items_in_batch") is None:
        raise ValueError(
            f"{type(model).__name__} computes its loss without handing shift_labels and num_items_in_batch on to "
            "self.loss_function; both are needed to sum the loss over chunks. Pass **kwargs of its forward on."
        )
    check_loss_function(model)


def _layer_outputs(model: PreTrainedModel, record: TrialRecord) -> int | None:
    """What layers return, as `Probe.layer_outputs`; from those that ran through if there are any."""
    layers = [layer for layer in record.layers.values() if layer.error is None] or list(record.layers.values())
    lengths = {None if isinstance(layer.output, Tensor) else _length(layer.output) for layer in layers}
    if len(lengths) != 1 or 0 in lengths:
        kinds = sorted({type(layer.output).__name__ for layer in layers})
        raise ValueError(
            f"the layers of {type(model).__name__} return {', '.join(kinds)}; a layer that can be run on another stage "
            "returns its hidden states, alone or first in a tuple, the same from every layer"
        )
    return lengths.pop()


def _length(output: Any) -> int:
    return len(output) if isinstance(output, tuple) and output and isinstance(output[0], Tensor) else 0


def _uncuttable(record: TrialRecord) -> str | None:
    before: Tensor | None = None
    for index, layer in sorted(record.layers.items()):
        if layer.hidden is not None and layer.hidden.ndim != 3:
            return (
                f"layer {index} is given {layer.hidden.ndim} axes, {list(layer.hidden.shape)}, and only hidden states "
                "[rows, tokens, size] are sent"
            )
        if before is not None and layer.hidden is not before:
            return f"what layer {index} is given is not what layer {index - 1} returned"
        if any(tensor.requires_grad for tensor in layer.others):
            return f"layer {index} is given more than one tensor with a gradient"
        before = layer.output if isinstance(layer.output, Tensor) else layer.output[0]
    return None


def _unpackable(model: PreTrainedModel, record: TrialRecord) -> str | None:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    from lightning_seq1f1b.models.chunk_cache import layer_kinds

    name, layers = type(model).__name__, sorted(record.layers.items())
    kinds = layer_kinds(model.config)
    recurrent = [
        index
        for index, layer in layers
        if layer.wrote_state or (index < len(kinds) and isinstance(kinds[index], LinearAttentionCacheLayerMixin))
    ]
    if recurrent:
        return f"layers {_listed(recurrent)} of {name} are recurrent and carry their state on into the next document"
    own = [index for index, layer in layers if layer.attention is None]
    if own:
        return f"layers {_listed(own)} of {name} compute attention by themselves and cannot be told to keep them apart"
    filled = [index for index, layer in layers if layer.attention is not None and not layer.attention.described]
    if filled:
        return f"layers {_listed(filled)} of {name} have masks of their own, which know nothing of documents"
    return None
