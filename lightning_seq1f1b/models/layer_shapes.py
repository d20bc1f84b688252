"""Counts what each layer of a model multiplies and keeps, on a copy without memory, instead of guessing it."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from lightning_seq1f1b.models.attention import describe_mask
from lightning_seq1f1b.models.chunk_cache import ChunkedState, layer_kinds
from lightning_seq1f1b.models.trial_run import trial_run
from lightning_seq1f1b.models.trunk import find_trunk
from lightning_seq1f1b.runtime.kv_buffer import appended
from lightning_seq1f1b.runtime.linear_layers import linear_layers
from lightning_seq1f1b.schedule.costs import LayerShape, ModelShape
from lightning_seq1f1b.schedule.spans import spans

NAME = "lightning_seq1f1b_counting"
"""Attention implementation that computes nothing, and keeps for its backward what ours keeps."""

_LENGTHS = (128, 64)
"""Tokens of two runs; what does not grow with them falls out of the difference."""

_DTYPE = torch.bfloat16
"""Tells what is kept in the activations' dtype from what is kept in float32."""


def count_layers(config: PreTrainedConfig, sizes: ModelShape) -> tuple[LayerShape, ...]:
    """The shape of every layer; empty when no model can be made from the config.

    Weights are counted from the modules. What autograd keeps is counted in a run on the meta device; a layer that does
    not run there keeps what `sizes` says.

    Args:
        config: of a causal language model.
        sizes: what the config says of the layers.
    """
    try:
        model = _without_memory(config, sizes)
        trunk = find_trunk(model)
    except Exception:  # a model's own code may need anything that is not here; sizes are then as good as it gets
        return ()
    layers = list(trunk.layers)
    weights = [_weights(layer, sizes) for layer in layers]
    state = ChunkedState(layer_kinds(model.config), 1)
    record = _Record(model)
    for index, layer in enumerate(layers):
        record.watch(index, layer)
    with torch.autograd.graph.saved_tensors_hooks(record.keep, lambda tensor: tensor):
        seen = [trial_run(trunk, NAME, spans([length])).layers for length in _LENGTHS][-1]
    found = []
    for index, counted in enumerate(weights):
        shape = replace(sizes.layer(index), window=state.window(index), **counted)
        first = record.first_alike[index]
        if record.has_seen(first) and seen[first].error is None:
            counts = record.counts(first)
            if not seen[first].wrote_keys:
                shape = replace(shape, window=0, pair_width=0, kv_width=0, **counts)
            elif "pair_width" in counts:  # others attend in a way of their own, and are not counted
                shape = replace(shape, kv_width=seen[first].kv_width, **counts)
        found.append(shape)
    return tuple(found)


def _without_memory(config: PreTrainedConfig, sizes: ModelShape) -> PreTrainedModel:
    config = copy.deepcopy(config)
    if sizes.num_experts:
        # Of the ways to run experts the one that is made for training on an accelerator, and needs no values.
        config._experts_implementation = "grouped_mm"
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=_DTYPE, attn_implementation="eager")


def _kind(layer: nn.Module) -> Hashable:
    """The same for layers that do the same: types, shapes and settings of all modules, but not their place."""
    return tuple(
        (
            name,
            type(module),
            tuple((key, tuple(tensor.shape)) for key, tensor in module.named_parameters(recurse=False)),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, (bool, int, float, str)) and key not in ("layer_idx", "layer_id", "layer_number")
            ),
        )
        for name, module in layer.named_modules()
    )


def _weights(layer: nn.Module, sizes: ModelShape) -> dict[str, int]:
    """`matrices`, `parameters` and `joint_matrices` of a layer."""
    linear = {module.module for module in linear_layers(layer, transposed=(Conv1D,))}
    share = sizes.experts_per_token / sizes.num_experts if sizes.num_experts else 0.0
    waiting = joint = 0.0
    for name, module in layer.named_modules():
        for parameter in module.parameters(recurse=False):
            stacked = parameter.ndim == 3 and parameter.shape[0] == sizes.num_experts
            sent = share if stacked or re.search(r"(^|\.)experts\.\d", name) else 1.0
            if module in linear and parameter.ndim == 2:
                waiting += sent * parameter.numel()
            elif stacked or (parameter.ndim == 2 and not isinstance(module, nn.Embedding)):
                joint += sent * parameter.numel()
    return {
        "matrices": round(waiting + joint),
        "parameters": sum(parameter.numel() for parameter in layer.parameters() if parameter.ndim > 1),
        "joint_matrices": round(joint),
    }


@dataclass
class _Run:
    """What one layer did in one run: bytes it kept, elements its linear layers read and gave, its attention."""

    narrow: int = 0
    wide: int = 0
    read: int = 0
    given: int = 0
    inputs: set[int] = field(default_factory=set)
    attention: dict[str, int] | None = None


class _Record:
    """Notes what the layers of a model do, run by run; of layers that are alike only the first one runs.

    Attributes:
        first_alike: for every layer the first one that is like it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.first_alike: dict[int, int] = {}
        self._first: dict[Hashable, int] = {}
        self._outputs: dict[int, Any] = {}
        self._runs: dict[int, list[_Run]] = defaultdict(list)
        self._current: _Run | None = None
        self._seen: set[int] = set()
        self._alive: list[Tensor] = []  # so that no storage is taken for one that was freed
        self._look_at(model.parameters())
        self._look_at(model.buffers())

    def watch(self, index: int, layer: nn.Module) -> None:
        """Note what `layer` does from now on."""
        forward = layer.forward
        first = self.first_alike[index] = self._first.setdefault(_kind(layer), index)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if first != index and first in self._outputs:
                return self._outputs[first]
            self._outputs.pop(index, None)
            _, *others = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self._look_at(others)  # they are not this layer's own
            self._current = _Run()
            self._runs[index].append(self._current)
            try:
                output = self._outputs[index] = forward(*args, **kwargs)
                return output
            finally:
                self._current = None

        layer.forward = watched
        for linear in linear_layers(layer, transposed=(Conv1D,)):
            linear.module.register_forward_hook(self._linear)
        for module in layer.modules():
            vars(module)[_RECORD] = self

    def keep(self, tensor: Tensor) -> Tensor:
        """What autograd is told to keep; what it has been told before, or is kept anyway, does not count."""
        if self._current is not None and self._look_at([tensor]):
            size = tensor.untyped_storage().nbytes()
            if tensor.dtype == _DTYPE:
                self._current.narrow += size
            else:
                self._current.wide += size
        return tensor

    def attended(self, query: Tensor, value: Tensor) -> None:
        """Note an attention; both [rows, heads, tokens, size]."""
        if self._current is not None:
            self._current.attention = {
                "pair_width": query.shape[1] * (query.shape[3] + value.shape[3]),
                "heads": query.shape[1],
            }

    def has_seen(self, index: int) -> bool:
        """Whether the layer ran every time."""
        return len(self._runs[index]) == len(_LENGTHS)

    def counts(self, index: int) -> dict[str, int]:
        """Fields of the `LayerShape`: of the attention, if there was one, and elements for each token."""
        long, short = self._runs[index]
        tokens = _LENGTHS[0] - _LENGTHS[1]

        def each(longer: int, shorter: int, size: int) -> int:
            return max(0, round((longer - shorter) / tokens / size))

        return {
            "linear_inputs": each(long.read, short.read, 1),
            "linear_outputs": each(long.given, short.given, 1),
            "saved": each(long.narrow, short.narrow, _DTYPE.itemsize),
            "saved_wide": each(long.wide, short.wide, torch.float32.itemsize),
            **(short.attention or {}),
        }

    def _linear(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if self._current is not None:
            storage = inputs[0].untyped_storage()._cdata
            self._current.given += output.numel()
            if storage not in self._current.inputs:
                self._current.inputs.add(storage)
                self._current.read += inputs[0].numel()
            self._alive.append(inputs[0])

    def _look_at(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of these has storage that was not seen before."""
        fresh = [tensor for tensor in tensors if tensor.untyped_storage()._cdata not in self._seen]
        self._alive += fresh
        self._seen.update(tensor.untyped_storage()._cdata for tensor in fresh)
        return bool(fresh)


_RECORD = "seq1f1b_record"
"""The attribute of modules of a model that is being counted where its attention finds the record."""


class _Keeps(torch.autograd.Function):
    """Of an attention no more than that its output has the queries' gradient, and what ours keeps for that."""

    @staticmethod
    def forward(ctx: Any, value_size: int, query: Tensor, *others: Tensor) -> Tensor:
        rows, heads, tokens, _ = query.shape
        # Laid out as the linear layer behind it reads it, which then keeps no copy.
        output = query.new_empty(rows, tokens, heads, value_size)
        ctx.save_for_backward(query, *others, output, query.new_empty(rows, heads, tokens, dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("a model that is counted has no backward")


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    vars(module)[_RECORD].attended(query, value)
    # What lies in a KV buffer is kept anyway.
    others = () if appended(key, value) is not None else (key, value)
    return _Keeps.apply(value.shape[-1], query, *others), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, describe_mask)
