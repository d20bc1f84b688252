"""Gradients as a whole: set old ones aside, deliver fresh ones, take the norm over all stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_seq1f1b.runtime.wide_gradients import WideGradients


class GradientStash:
    """Fresh gradients of one pipelined step, kept out of `.grad` until the host's backward asks for them.

    Those of bfloat16 and float16 parameters are float32, see `WideGradients`.

    Args:
        parameters: whose gradients the step computes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._kept: list[Tensor | None] = []
        self._wide = WideGradients(self._parameters)

    def set_aside(self, *, keep: bool) -> None:
        """Clear `.grad` before the step; what was there is kept for `take` when `keep`, else freed."""
        self._kept = [parameter.grad if keep else None for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._wide.begin()

    def take(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Move the fresh gradients out of `.grad` and put back what was set aside."""
        fresh = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        self._wide.end()
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            parameter.grad = kept
        self._kept = []
        return fresh


def deliver(fresh: list[tuple[nn.Parameter, Tensor]], factor: Tensor) -> None:
    """Add `factor` times the stashed gradients to `.grad`, and empty the list.

    `.grad` has the dtype that autograd would give it, the parameter's; a sum is rounded to it once.

    Args:
        fresh: what `GradientStash.take` returned; its tensors are scaled in place, and let go of one by one.
        factor: 0-d; the gradient of the loss that the host's backward starts from.
    """
    while fresh:
        parameter, gradient = fresh.pop()
        gradient.mul_(factor.to(gradient.dtype))
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
        else:
            parameter.grad = gradient.to(parameter.grad_dtype or gradient.dtype)


def pipeline_norm(gradients: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The 2-norm of all stages' gradients together, a 0-d tensor equal on all ranks of the pipeline.

    Args:
        gradients: those this rank counts; a weight that exists on several ranks is counted by one of them.
        group: the pipeline's processes.
        device: the group's device, needed where a rank counts nothing.
    """
    dtype = torch.float32
    for gradient in gradients:
        dtype = torch.promote_types(dtype, gradient.dtype)
    local = torch.nn.utils.get_total_norm(list(gradients)) if gradients else torch.zeros((), device=device)
    squared = local.to(device=device, dtype=torch.float64 if device.type != "mps" else dtype).square()
    dist.all_reduce(squared, group=group)
    return squared.sqrt().to(dtype)
