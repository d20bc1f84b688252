"""The gradient bridge: one autograd node that delivers a finished step's gradients when Lightning asks for them.

Lightning's automatic optimization calls `training_step`, then `zero_grad`, then `backward`. The pipelined step computes
its gradients inside `training_step`, so they must not lie in `.grad` when `zero_grad` runs. They wait in a stash, and
the returned loss has a single autograd node that adds them to `.grad`, times the gradient that reaches the loss. What
the user does to the loss (`0.5 * loss`, accumulation's division) so acts on the gradients as on one device. A scaled
loss has scaled the gradients inside the step; then the factor that is left is applied here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_seq1f1b.runtime.gradients import deliver


class _Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, anchor: Tensor, commit: Callable[[Tensor], None]) -> Tensor:
        ctx.commit = commit
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.commit(gradient)
        return None, None, None


def bridge(
    loss: Tensor,
    fresh: list[tuple[nn.Parameter, Tensor]],
    then: Callable[[Tensor], None] = lambda factor: None,
    scale: Tensor | None = None,
) -> Tensor:
    """Attach stashed gradients to a loss.

    Args:
        loss: 0-d, without autograd.
        fresh: parameters and their gradients of this loss; emptied at the first backward, so that a loss the user keeps
            does not keep a second set of gradients.
        then: called once they are delivered, with the factor they were multiplied by.
        scale: 0-d, what the gradients have been multiplied by already, see `strategy.loss_scale`; None for 1.

    Returns:
        The loss, whose `backward` adds the gradients to `.grad`. A second backward raises `RuntimeError`, as torch does
        for a graph that has been freed.
    """
    delivered = False

    def commit(gradient: Tensor) -> None:
        nonlocal delivered
        if delivered:
            raise RuntimeError(
                "backward was called twice on one pipelined loss; its gradients have been delivered. "
                "Call the model again"
            )
        delivered = True
        factor = gradient if scale is None else gradient / scale
        deliver(fresh, factor)
        then(factor)

    # A leaf that requires a gradient makes autograd call the node; it receives none itself.
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    return _Bridge.apply(loss, anchor, commit)
