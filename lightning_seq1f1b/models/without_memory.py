"""Modules on the meta device: every name, shape and dtype, and not a byte of memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def meta_twin(tensor: Tensor) -> Tensor:
    """A tensor on the meta device like this one; a parameter stays one, with its `requires_grad`."""
    twin = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin


def free(modules: Iterable[nn.Module], kept: Iterable[Tensor]) -> None:
    """Turn the modules' parameters and buffers, in place, into meta tensors; those in `kept` are left as they are.

    A tensor that stands in several places becomes one meta tensor in all of them, so tied weights stay tied.
    """
    twins: dict[int, Tensor] = {id(tensor): tensor for tensor in kept}
    originals: list[Tensor] = []  # alive until the end, so that no id is given to another tensor
    for root in modules:
        for module in root.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in twins:
                        originals.append(tensor)
                        twins[id(tensor)] = meta_twin(tensor)
                        twins[id(twins[id(tensor)])] = twins[id(tensor)]
                    table[name] = twins[id(tensor)]  # type: ignore[assignment]


def meta_copy(model: ModuleT) -> ModuleT:
    """Copy of a model on the meta device, made without copying data.

    Unlike a model built anew from its config, it has what was changed since: adapters, replaced modules, frozen
    parameters; and it needs nothing of the class's constructor. Hooks and forwards set on single modules are left out:
    they belong to others, and would reach back to them.
    """
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = meta_twin(value)
        for name, value in vars(module).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                memo[id(value)] = type(value)()
            if name == "forward":
                memo[id(value)] = None
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        vars(module).pop("forward", None)
    return twin
