"""Gradients as a whole: set old ones aside, sum tied copies, average replicas, take the norm over all stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class GradientStash:
    """Fresh gradients of one pipelined step, kept out of `.grad` until the host's backward asks for them.

    Args:
        parameters: whose gradients the step computes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._kept: list[Tensor | None] = []

    def set_aside(self, *, keep: bool) -> None:
        """Clear `.grad` before the step; what was there is kept for `take` when `keep`, else freed."""
        self._kept = [parameter.grad if keep else None for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def take(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Move the fresh gradients out of `.grad` and put back what was set aside."""
        fresh = [(parameter, parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            parameter.grad = kept
        self._kept = []
        return fresh


def deliver(fresh: list[tuple[nn.Parameter, Tensor]], factor: Tensor) -> None:
    """Add `factor` times the stashed gradients to `.grad`, and empty the list.

    Args:
        fresh: what `GradientStash.take` returned; its tensors are scaled in place.
        factor: 0-d; the gradient of the loss that the host's backward starts from.
    """
    for parameter, gradient in fresh:
        gradient.mul_(factor.to(gradient.dtype))
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    fresh.clear()


def sum_where_any(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> list[Tensor]:
    """Sum `.grad` over a group, in place, for the parameters that have one on any of its processes.

    Where none has one it stays None, so that an optimizer passes the parameter by, as on one device.

    Args:
        parameters: the same on all processes of the group.
        group: the processes that hold copies of them.

    Returns:
        The summed gradients.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return []
    has = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
    has = has.to(trained[0].device)
    dist.all_reduce(has, op=dist.ReduceOp.MAX, group=group)
    works = []
    for parameter, any_has in zip(trained, has.tolist(), strict=True):
        if any_has:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append((dist.all_reduce(parameter.grad, group=group, async_op=True), parameter.grad))
    for work, _ in works:
        assert work is not None
        work.wait()
    return [gradient for _, gradient in works]


def average_replicas(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average `.grad` over the replicas, in place; a replica without a gradient that others have counts as zero."""
    size = dist.get_world_size(group)
    for gradient in sum_where_any(parameters, group):
        gradient.div_(size)


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
