"""Finds the linear layers of a model whose backward may be split into input gradient and weight gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """A module that computes x W + b, and nothing else, from its parameters `weight` and `bias`.

    Attributes:
        module: its forward takes x, [..., inputs], and gives [..., outputs].
        transposed: whether `weight` is [inputs, outputs], as in GPT-2's layers, rather than [outputs, inputs].
    """

    module: nn.Module
    transposed: bool = False


def linear_layers(root: nn.Module, transposed: tuple[type[nn.Module], ...] = ()) -> tuple[LinearLayer, ...]:
    """All linear layers in and below `root`, each once.

    Subclasses of `nn.Linear` count as long as they leave its forward alone. What is compiled is left out with all that
    is in it: its forward is not run by Python.

    Args:
        root: where to look.
        transposed: types whose forward is that of a linear layer with a weight of [inputs, outputs].
    """
    kinds = [(nn.Linear.forward, False), *((kind.forward, True) for kind in transposed)]
    found = []
    for module in _interpreted(root, set()):
        flags = [is_transposed for forward, is_transposed in kinds if type(module).forward is forward]
        if flags:
            found.append(LinearLayer(module, flags[0]))
    return tuple(found)


def _interpreted(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    if compiled or module in seen:
        return
    seen.add(module)
    yield module
    for child in module.children():
        yield from _interpreted(child, seen)
