"""Gradients of parameters that several ranks of a pipeline hold, such as tied embeddings: their sum is the gradient.

The sum is begun at the end of the step and waited for when the gradient is delivered. Till then the rank of the last
stage, which ends a step first, reduces its other gradients while the first stages are still at their last backwards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


class CopiedGradients:
    """Takes the step's gradients of some parameters out of `.grad` and sums them over the ranks that hold copies.

    Args:
        parameters: the same on all processes of the group.
        group: the processes that hold copies of them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._works: list[dist.Work | None] = []
        if not self._trained:
            return
        has = torch.tensor([parameter.grad is not None for parameter in self._trained], dtype=torch.int32)
        self._any_has = has.to(self._trained[0].device)
        self._works.append(dist.all_reduce(self._any_has, op=dist.ReduceOp.MAX, group=group, async_op=True))
        self._gradients = [torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad for p in self._trained]
        for parameter, gradient in zip(self._trained, self._gradients, strict=True):
            parameter.grad = None
            self._works.append(dist.all_reduce(gradient, group=group, async_op=True))

    def summed(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Wait for the sums; a parameter without a gradient on any rank has none, so that optimizers pass it by."""
        for work in self._works:
            assert work is not None
            work.wait()
        if not self._trained:
            return []
        triples = zip(self._trained, self._gradients, self._any_has.tolist(), strict=True)
        return [(parameter, gradient) for parameter, gradient, any_has in triples if any_has]
