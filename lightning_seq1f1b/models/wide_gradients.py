"""Sums many small contributions to the gradients of low-precision parameters without rounding each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_LOW = (torch.bfloat16, torch.float16)


@contextmanager
def summed_in_float32(parameters: Iterable[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Inside, `.grad` of bfloat16 and float16 parameters starts empty; on leaving, the sum is added to what it was.

    Args:
        parameters: whose gradients are computed inside; those of higher precision are left alone.

    Yields:
        To be called after each contribution to `.grad`: moves it to a sum in float32.
    """
    low = list({p: None for p in parameters if p.requires_grad and p.dtype in _LOW})
    before = [parameter.grad for parameter in low]
    sums: list[Tensor | None] = [None] * len(low)

    def collect() -> None:
        for index, parameter in enumerate(low):
            if parameter.grad is not None:
                total = sums[index]
                sums[index] = parameter.grad.float() if total is None else total.add_(parameter.grad)
                parameter.grad = None

    for parameter in low:
        parameter.grad = None
    try:
        yield collect
    finally:
        for parameter, kept, total in zip(low, before, sums, strict=True):
            if total is not None:
                kept = total.to(parameter.dtype) if kept is None else kept.add_(total)
            parameter.grad = kept
