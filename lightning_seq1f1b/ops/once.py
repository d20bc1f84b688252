"""Backwards that are not differentiable themselves."""

from __future__ import annotations

import torch


def refuse_second_derivatives(what: str) -> None:
    """To be called in a backward; autograd's own check misses backwards whose incoming gradient is a constant.

    Raises:
        RuntimeError: the backward runs under `create_graph=True`.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} has no second derivative: its backward cannot run with create_graph=True")
