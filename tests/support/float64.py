"""Lift the explicit float32 casts inside transformers to float64, so that comparisons show exactness, not rounding."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch


class _Torch(ModuleType):
    """The torch module, whose float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Inside, `torch.float32`, `torch.float` and `tensor.float()` mean float64 in transformers' loaded modules."""
    lifted = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.") and vars(module).get("torch") is torch
    ]
    to_float = torch.Tensor.float
    stand_in = _Torch("torch")
    for module in lifted:
        module.torch = stand_in
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in lifted:
            module.torch = torch
        torch.Tensor.float = to_float  # type: ignore[method-assign]
