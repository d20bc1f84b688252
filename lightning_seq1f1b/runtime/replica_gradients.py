"""The average of gradients over replicas, in flat buckets, once per optimizer step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_seq1f1b.runtime.flat_buckets import FlatBucket, flat_buckets


class ReplicaAverage:
    """Averages `.grad` over replicas, in place. All collectives are launched before the first is waited for.

    Args:
        group: the processes of all replicas that hold the same parameters.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        self._launched: list[tuple[dist.Work | None, FlatBucket, Tensor]] = []

    @torch.no_grad()
    def launch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to average the gradients of some parameters, in their order.

        A replica without a gradient that another one has counts as zero: a batch may route no token to some expert.
        Where no replica has one it stays None, so that an optimizer passes the parameter by, as on one device.

        Args:
            parameters: the same on all replicas, called for in the same order.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        if not trained:
            return
        has = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        has = has.to(trained[0].device)
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self._group)
        wanted = [parameter for parameter, any_has in zip(trained, has.tolist(), strict=True) if any_has]
        for parameter in wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        for bucket in flat_buckets([parameter.grad for parameter in wanted if parameter.grad is not None]):
            flat = bucket.filled().div_(self._size)  # before the sum, which a half-precision gradient might overflow
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            self._launched.append((work, bucket, flat))

    def finish(self) -> None:
        """Wait for all averages."""
        for work, bucket, flat in self._launched:
            assert work is not None
            work.wait()
            bucket.copy_out(flat)
        self._launched = []
