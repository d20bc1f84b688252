"""Run a model without memory, chunk by chunk, and write down what its layers are given, return and ask of the cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from lightning_seq1f1b.models.attention import attend, describe_mask
from lightning_seq1f1b.models.chunk_cache import ChunkCache, ChunkedState, layer_kinds
from lightning_seq1f1b.models.made_up_values import MadeUpValues
from lightning_seq1f1b.models.padding_check import silence_padding_check
from lightning_seq1f1b.models.requirements import cache_argument
from lightning_seq1f1b.models.rotary import length_dependent
from lightning_seq1f1b.models.trunk import Trunk
from lightning_seq1f1b.ops.visibility import Visibility
from lightning_seq1f1b.runtime.kv_buffer import appended
from lightning_seq1f1b.schedule.spans import Span, spans

NAME = "lightning_seq1f1b_trial"
"""Attention implementation of a trial run: it computes nothing, and leaves a mark on the layer that called it."""

CHUNKS = spans([3, 2])
"""The chunks of a trial run."""


@dataclass(frozen=True)
class AttentionRecord:
    """What an attention function was called with.

    Attributes:
        keys: how many.
        cached: whether they are just what the cache gave.
        sees_ahead: whether its queries may see later ones.
        described: whether its mask was described by `describe_mask`, or is another.
        unknown: names of further tensors, which ours takes no notice of.
        window: tokens that a described mask lets a query look back on; None for all.
    """

    keys: int
    cached: bool
    sees_ahead: bool
    described: bool
    unknown: tuple[str, ...]
    window: int | None


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
        recurrence: the state of its recurrence that the chunk before left, if it asked for it.
        wrote_recurrence: whether it handed the state of a recurrence to the cache.
        goes_on: whether what it returned depends on `recurrence`.
        window: tokens of which the cache keeps keys and values for it; None for all.
        attention: what its attention was given; None when it did not call the attention interface.
    """

    hidden: Tensor | None = None
    others: list[Tensor] = field(default_factory=list)
    output: Any = None
    error: Exception | None = None
    wrote_keys: bool = False
    kv_width: int = 0
    wrote_state: bool = False
    recurrence: Tensor | None = None
    wrote_recurrence: bool = False
    goes_on: bool = False
    window: int | None = None
    attention: AttentionRecord | None = None


@dataclass
class TrialRecord:
    """What a trial run showed.

    Attributes:
        before: full names of the modules beside the layers that ran before the first layer.
        calls: indices of the layers in the order they were called, in the last chunk.
        layers: what each of them did, by its index.
        loss_arguments: keyword arguments of the loss function; None when the run did not get there.
        leaks: whether a chunk reaches the one before past the cache.
        error: what ended the run early.
    """

    before: set[str] = field(default_factory=set)
    calls: list[int] = field(default_factory=list)
    layers: dict[int, LayerRecord] = field(default_factory=dict)
    loss_arguments: dict[str, Any] | None = None
    error: Exception | None = None
    leaks: bool = False


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

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        # Not the model's: one that looks at values would fail here; `own_loss` tries it on real ones.
        record.loss_arguments = kwargs
        return torch.zeros((), device="meta")

    model.loss_function = loss
    silence_padding_check(model)
    for module in length_dependent(model):
        module.rope_type = _fixed(module.rope_type)
    state = ChunkedState(layer_kinds(model.config), chunks[-1].stop)
    try:
        for index, span in enumerate(chunks):
            earlier = [layer.hidden for layer in record.layers.values() if layer.hidden is not None]
            record.calls.clear()
            caches[:] = [_TrialCache(state, index, span)]
            with MadeUpValues(), torch.enable_grad():
                type(model).forward(model, **_arguments(model, span, caches[0]))
    except Exception as error:
        record.error = error
    else:
        record.leaks = _reaches([layer.output for layer in record.layers.values()], earlier)
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
        hidden = tensors[0] if tensors else None
        seen = record.layers[index] = LayerRecord(hidden, tensors[1:], window=caches[0].window(index))
        caches[0].record = seen
        _Mark.clear(layer)
        try:
            seen.output = forward(*args, **kwargs)
        except Exception as error:
            seen.error = error
        seen.attention = _Mark.find(layer)
        seen.goes_on = seen.recurrence is not None and _reaches(seen.output, [seen.recurrence])
        if seen.error is not None:
            outputs = annotated_outputs(layer)
            seen.output = seen.hidden if outputs is None else (seen.hidden, *[None] * (outputs - 1))
        return seen.output

    return watched


def _reaches(outputs: Any, inputs: list[Tensor]) -> bool:
    """Whether autograd leads from any of the outputs back to one of the inputs."""
    # A view of a leaf leads to the node that adds up its gradient.
    views = [tensor.view_as(tensor).grad_fn for tensor in inputs if tensor.requires_grad]
    ends = {view.next_functions[0][0] for view in views if view is not None}
    seen = set(nodes := [tensor.grad_fn for tensor in _tensors(outputs) if tensor.grad_fn is not None])
    while nodes:
        node = nodes.pop()
        if node in ends:
            return True
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        nodes += following
    return False


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

    def __init__(self, state: ChunkedState, index: int, span: Span) -> None:
        super().__init__(state, index, span)
        self.record = LayerRecord()  # of what is not in a layer

    def window(self, layer_idx: int) -> int | None:
        """Tokens of which it keeps keys and values for a layer; None for all."""
        return self._state.window(layer_idx)

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
        self.record.wrote_state = self.record.wrote_recurrence = True
        return super().update_recurrent_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor | None:
        self.record.recurrence = super().get_recurrent_state(*args, **kwargs)
        return self.record.recurrence


class _Mark:
    """An `AttentionRecord` left on the layer that called the attention interface; the model is thrown away after."""

    @staticmethod
    def clear(layer: nn.Module) -> None:
        for module in layer.modules():
            vars(module).pop("trial_attention", None)

    @staticmethod
    def find(layer: nn.Module) -> AttentionRecord | None:
        marks = [vars(module)["trial_attention"] for module in layer.modules() if "trial_attention" in vars(module)]
        return max(marks, key=lambda mark: mark.cached) if marks else None


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
    described = isinstance(attention_mask, Visibility)
    window = attention_mask.window if isinstance(attention_mask, Visibility) else None
    known = inspect.signature(attend).parameters
    vars(module)["trial_attention"] = AttentionRecord(
        keys=key.shape[2],
        cached=appended(key, value) is not None,
        sees_ahead=sees_ahead,
        described=described,
        unknown=tuple(
            name
            for name, each in kwargs.items()
            if isinstance(each, Tensor) and each.requires_grad and name not in known
        ),
        window=window,
    )
    rows, heads, tokens, _ = query.shape
    output = query.sum() + key.sum() + value.sum()
    return output.expand(rows, tokens, heads, value.shape[-1]).contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _describe_mask)
