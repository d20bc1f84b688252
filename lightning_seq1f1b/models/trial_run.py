"""Run a model without memory, chunk by chunk, and write down what its layers are given, return and ask of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from lightning_seq1f1b.models.attention import describe_mask
from lightning_seq1f1b.models.chunk_cache import ChunkCache, ChunkedState, layer_kinds
from lightning_seq1f1b.models.padding_check import silence_padding_check
from lightning_seq1f1b.models.requirements import cache_argument
from lightning_seq1f1b.models.rotary import length_dependent
from lightning_seq1f1b.models.trunk import Trunk
from lightning_seq1f1b.schedule.spans import Span, spans

NAME = "lightning_seq1f1b_trial"
"""Attention implementation of a trial run: it computes nothing, and leaves a mark on the layer that called it."""

CHUNKS = spans([3, 2])
"""The chunks of a trial run."""


@dataclass(frozen=True)
class AttentionRecord:
    """What an attention function was called with: how many keys, and whether its queries may see later ones."""

    keys: int
    sees_ahead: bool


@dataclass
class LayerRecord:
    """What one layer did in the last chunk.

    Attributes:
        hidden: the hidden states it was given; None when none were found.
        others: every other tensor it was given.
        output: what it returned; when it raised, what its annotation says it would return.
        error: what it raised, usually because an operation needs values, which the meta device has not.
        wrote_keys: whether it handed keys and values to the cache.
        kv_width: elements of them for each token.
        wrote_state: whether it handed a recurrent state to the cache.
        attention: what its attention was given; None when it did not call the attention interface.
    """

    hidden: Tensor | None = None
    others: list[Tensor] = field(default_factory=list)
    output: Any = None
    error: Exception | None = None
    wrote_keys: bool = False
    kv_width: int = 0
    wrote_state: bool = False
    attention: AttentionRecord | None = None


@dataclass
class TrialRecord:
    """What a trial run showed.

    Attributes:
        before: full names of the modules beside the layers that ran before the first layer.
        calls: indices of the layers in the order they were called, in the last chunk.
        layers: what each of them did, by its index.
        loss_arguments: keyword arguments of the loss function; None when the run did not get there.
        error: what ended the run early.
    """

    before: set[str] = field(default_factory=set)
    calls: list[int] = field(default_factory=list)
    layers: dict[int, LayerRecord] = field(default_factory=dict)
    loss_arguments: dict[str, Any] | None = None
    error: Exception | None = None


def trial_run(trunk: Trunk, attention: str, chunks: Sequence[Span] = CHUNKS) -> TrialRecord:
    """Run chunks through a model on the meta device, which is used up by it: forwards are replaced.

    Args:
        trunk: the trunk of the model.
        attention: the attention implementation to run with.
        chunks: the chunks of one row.
    """
    model = trunk.model
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    model.set_attn_implementation(attention)
    record = TrialRecord()
    for _, name, full_name in trunk.siblings():
        parent = model.get_submodule(full_name.rpartition(".")[0])
        getattr(parent, name).register_forward_pre_hook(_notice(record, full_name))
    caches: list[_TrialCache] = []
    for index, layer in enumerate(trunk.layers):
        layer.forward = _watch(record, index, layer, caches)
    loss_function = model.loss_function

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        record.loss_arguments = kwargs
        return loss_function(*args, **kwargs)

    model.loss_function = loss
    silence_padding_check(model)
    for module in length_dependent(model):
        module.rope_type = _fixed(module.rope_type)
    state = ChunkedState(layer_kinds(model.config), chunks[-1].stop)
    try:
        for index, span in enumerate(chunks):
            record.calls.clear()
            caches[:] = [_TrialCache(state, index, span)]
            type(model).forward(model, **_arguments(model, span, caches[0]))
    except Exception as error:
        record.error = error
    return record


def _arguments(model: PreTrainedModel, span: Span, cache: ChunkCache) -> dict[str, Any]:
    tokens = torch.zeros(1, span.length, dtype=torch.int64, device="meta")
    return {
        "input_ids": tokens,
        "position_ids": tokens,
        "labels": tokens,
        "shift_labels": tokens,
        "num_items_in_batch": torch.ones((), device="meta"),
        "use_cache": True,
        cache_argument(model) or "cache": cache,
    }


def _fixed(kind: Any) -> Any:
    """A rope type that does not look at positions, which have no values here."""
    return dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"


def _notice(record: TrialRecord, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: Any) -> None:
        if not record.calls:
            record.before.add(name)

    return hook


def _watch(record: TrialRecord, index: int, layer: nn.Module, caches: list[_TrialCache]) -> Callable[..., Any]:
    forward = layer.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        tensors = list(_tensors((args, kwargs)))
        record.calls.append(index)
        seen = record.layers[index] = LayerRecord(hidden=tensors[0] if tensors else None, others=tensors[1:])
        caches[0].record = seen
        _Mark.clear(layer)
        try:
            seen.output = forward(*args, **kwargs)
        except Exception as error:
            seen.error = error
        seen.attention = _Mark.find(layer)
        if seen.error is not None:
            outputs = annotated_outputs(layer)
            seen.output = seen.hidden if outputs is None else (seen.hidden, *[None] * (outputs - 1))
        return seen.output

    return watched


def annotated_outputs(layer: nn.Module) -> int | None:
    """Length of the tuple that a layer's forward is annotated to return; None for anything but a tuple."""
    annotation = get_type_hints(type(layer).forward).get("return")
    for alternative in (annotation, *get_args(annotation)):
        if get_origin(alternative) is tuple:
            return len(get_args(alternative))
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


class _TrialCache(ChunkCache):
    """The cache of a trial run: notes on the layer that is running that it was used."""

    record: LayerRecord

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.record.wrote_keys = True
        self.record.kv_width = sum(states.shape[1] * states.shape[3] for states in (key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self.record.wrote_state = True
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        self.record.wrote_state = True
        return super().update_recurrent_state(*args, **kwargs)


class _Mark:
    """An `AttentionRecord` left on the layer that called the attention interface; the model is thrown away after."""

    @staticmethod
    def clear(layer: nn.Module) -> None:
        for module in layer.modules():
            vars(module).pop("trial_attention", None)

    @staticmethod
    def find(layer: nn.Module) -> AttentionRecord | None:
        marks = [vars(module)["trial_attention"] for module in layer.modules() if "trial_attention" in vars(module)]
        return marks[0] if marks else None


class _SeesAhead:
    """In place of a mask that lets a query see a later key."""


def _describe_mask(mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> Any:
    first, second = torch.tensor(0), torch.tensor(1)
    try:
        sees_ahead = bool(mask_function(first, first, first, second))
    except Exception:  # a predicate over tensors of the model, which have no values here
        sees_ahead = False
    return _SeesAhead() if sees_ahead else describe_mask(mask_function=mask_function, **kwargs)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    sees_ahead = isinstance(attention_mask, _SeesAhead) or (
        attention_mask is None and not getattr(module, "is_causal", True)
    )
    vars(module)["trial_attention"] = AttentionRecord(key.shape[2], sees_ahead)
    rows, heads, tokens, _ = query.shape
    output = query.sum() + key.sum() + value.sum()
    return output.expand(rows, tokens, heads, value.shape[-1]).contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _describe_mask)
