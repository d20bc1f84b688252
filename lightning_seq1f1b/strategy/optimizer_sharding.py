"""Shares an optimizer's state over the replicas: each parameter is stepped by one of them, which then hands it out.

All replicas hold the same weights and, once reduced, the same gradients, so one of them can take a parameter's step
for all, and only it needs the optimizer's state (stage 1 of ZeRO, Rajbhandari et al. 2020). Parameters are shared out
whole, so that an optimizer whose step looks at a whole matrix, such as Adafactor or Muon, takes the step of one device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_seq1f1b.runtime.flat_buckets import FlatBucket, flat_buckets


def share_out(
    parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer], num_replicas: int
) -> dict[str, int]:
    """Which replica owns which parameter: about the same number of bytes for each.

    Args:
        parameters: of one rank, by name; the same on all replicas.
        optimizers: of that rank.
        num_replicas: at least 1.

    Returns:
        The owner's number for every name. What is trained is shared out by itself, so that frozen parameters, which
        have no state, do not weigh in.
    """
    owners: dict[str, int] = {}
    stepped = {p for optimizer in optimizers for p in parameters_of(optimizer) if p.requires_grad}
    for trained in (True, False):
        loads = [0] * num_replicas
        sizes = {name: p.numel() * p.element_size() for name, p in parameters.items() if (p in stepped) is trained}
        for name in sorted(sizes, key=lambda each: -sizes[each]):
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += sizes[name]
    return owners


_NOT_SHARED = {
    "ZeroRedundancyOptimizer": "it shares its state by itself; give the optimizer that it wraps",
    **dict.fromkeys(
        ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree", "ScheduleFreeWrapper"),
        "its train() and eval() change weights by the state of every parameter, on each rank",
    ),
}


def check_separable(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer whose state cannot be shared over replicas, by name."""
    name = type(optimizer).__name__
    reason = next(
        (_NOT_SHARED[each.__name__] for each in type(optimizer).__mro__ if each.__name__ in _NOT_SHARED), None
    )
    if reason is None and not isinstance(optimizer, Optimizer):
        reason = "it is no torch.optim.Optimizer"
    if reason is not None:
        raise ValueError(f"Seq1F1BStrategy(shard_optimizer=True) does not support {name}: {reason}")


class SharedSteps:
    """Lets an optimizer step this replica's own parameters only, and brings the others' results here.

    The optimizer stays the user's, with all parameters of the rank in its groups: schedulers, clipping and zeroing see
    what they see without sharing. While it steps, after its closure, gradients of what other replicas own are hidden
    from it, and optimizers pass parameters without a gradient by.

    Args:
        optimizer: holds parameters of this rank; state that it has for others' parameters is dropped.
        owners: the owner's number for each of them; the same on all replicas.
        group: the replicas, by number.

    Raises:
        ValueError: for an optimizer that does more than to take each parameter's step.
    """

    def __init__(self, optimizer: Optimizer, owners: Mapping[nn.Parameter, int], group: dist.ProcessGroup) -> None:
        check_separable(optimizer)
        self._optimizer, self._owners, self._group = optimizer, owners, group
        self._here = dist.get_rank(group)
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        for parameter in parameters_of(optimizer):
            if owners[parameter] != self._here:
                optimizer.state.pop(parameter, None)
        self._hooks = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    def end(self) -> None:
        """Give the optimizer back as it was; it may be used by another run."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        itself, *positional = args
        closure = kwargs.get("closure", positional[0] if positional else None)
        if closure is None:
            self._hide()
            return None
        # Lightning's closure computes, zeroes and clips gradients, all of them.
        closure = self._hiding_after(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (itself, closure, *positional[1:]), kwargs

    def _hiding_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self._show()
            result = closure()
            self._hide()
            return result

        return run

    def _hide(self) -> None:
        for parameter in parameters_of(self._optimizer):
            if parameter.grad is not None and self._owners[parameter] != self._here:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def _show(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._show()
        # Replicas agree on which parameters have gradients once these are reduced. One that was frozen since keeps its
        # gradient, which optimizers still follow.
        stepped = [p for p in parameters_of(optimizer) if p.requires_grad or p.grad is not None]
        hand_out(stepped, [self._owners[parameter] for parameter in stepped], self._group)


_MAX_UNDER_WAY = 8
"""Buckets that travel at once: enough to keep a link busy, without a second copy of many small weights."""


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters in an optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@torch.no_grad()
def hand_out(tensors: Sequence[Tensor], owners: Sequence[int], group: dist.ProcessGroup) -> None:
    """Bring each tensor's values from its owner to all processes of a group, in place.

    Args:
        tensors: alike on all processes; they travel in flat buckets.
        owners: the rank within the group that has the values, for each tensor.
        group: the processes.
    """
    here = dist.get_rank(group)
    under_way: deque[tuple[dist.Work | None, FlatBucket, Tensor, int]] = deque()

    def end_oldest() -> None:
        work, bucket, flat, owner = under_way.popleft()
        assert work is not None
        work.wait()
        if owner != here:
            bucket.copy_out(flat)

    for owner in range(dist.get_world_size(group)):
        owned = [tensor for tensor, its in zip(tensors, owners, strict=True) if its == owner]
        for bucket in flat_buckets(owned):
            flat = bucket.filled() if owner == here else bucket.empty()
            work = dist.broadcast(flat, group=group, group_src=owner, async_op=True)
            under_way.append((work, bucket, flat, owner))
            if len(under_way) > _MAX_UNDER_WAY:
                end_oldest()
    while under_way:
        end_oldest()
