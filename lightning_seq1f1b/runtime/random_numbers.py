"""The same random numbers on all ranks of a pipeline, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seq1f1b.runtime.topology import Topology


@contextmanager
def first_rank_decides(topology: Topology, group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Inside, torch's default generators of the CPU and the device go on from where the first rank's stand.

    Behind it, a rank whose generator stood elsewhere (a device's, which dropout has moved) finds it where it was; one
    that stood there goes on, as on one device.

    Args:
        topology: the place of this rank.
        group: the pipeline's control group.
        device: where the ranks compute.
    """
    if topology.num_stages == 1:
        yield
        return
    generators = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
    before = [generator.get_rng_state() for generator in generators]
    first = [state.clone() for state in before]
    for state in first:
        dist.broadcast(state, topology.pipeline_ranks[0], group=group)
    _set(generators, first)
    try:
        yield
    finally:
        for generator, own, shared in zip(generators, before, first, strict=True):
            if not torch.equal(own, shared):
                generator.set_rng_state(own)


def _set(generators: list[object], states: list[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_rng_state(state)  # type: ignore[attr-defined]  # a module of torch
