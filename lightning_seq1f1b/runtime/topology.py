"""Which process is which stage of which replica, and the process groups that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_seq1f1b.schedule.transfers import Channel


@dataclass(frozen=True)
class Topology:
    """Pipeline ranks of one replica are neighbours: rank = replica * num_stages + pipeline rank.

    Neighbouring stages so share a node wherever the launcher numbers ranks node by node.

    Args:
        rank: this process among all.
        world_size: number of processes.
        num_stages: pipeline ranks of one replica.

    Raises:
        ValueError: when the processes do not divide into whole pipelines.
    """

    rank: int
    world_size: int
    num_stages: int

    def __post_init__(self) -> None:
        if self.num_stages < 1:
            raise ValueError(f"num_stages must be at least 1, not {self.num_stages}")
        if self.world_size % self.num_stages:
            raise ValueError(
                f"{self.world_size} processes do not divide into pipelines of {self.num_stages} stages: make devices x "
                f"num_nodes a multiple of num_stages, or choose num_stages among the divisors of {self.world_size}"
            )

    @property
    def num_replicas(self) -> int:
        """Number of full pipelines; each sees its own data."""
        return self.world_size // self.num_stages

    @property
    def pipeline_rank(self) -> int:
        """The place of this process in its pipeline."""
        return self.rank % self.num_stages

    @property
    def replica(self) -> int:
        """Which pipeline this process belongs to."""
        return self.rank // self.num_stages

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """Ranks of this replica's processes, by pipeline rank."""
        first = self.replica * self.num_stages
        return tuple(range(first, first + self.num_stages))


class Lanes(NamedTuple):
    """Two process groups of the same processes, so that between two ranks each carries messages one way only.

    Messages between two ranks carry no tag on NCCL and so match in order, and NCCL runs those of one pair one after
    another whichever way they go. With several stages on a rank, activations go up from rank to rank and down again
    from the last rank to the first; with two ranks these are the same pair.

    Attributes:
        up: from lower ranks to higher ones.
        down: from higher ranks to lower ones.
    """

    up: dist.ProcessGroup
    down: dist.ProcessGroup


@dataclass(frozen=True)
class Groups:
    """Process groups of one process.

    Attributes:
        pipeline: the replica's processes.
        forward: the same processes; carries activations.
        backward: the same processes; carries gradients.
        control: the same processes, always over gloo on the CPU; carries small objects and checkpoints.
        replica: the processes of all replicas that hold the same stages.
        ends: first and last pipeline rank of the replica, which share tied embeddings.
        everyone: all processes, always over gloo on the CPU; carries small objects and checkpoints.
        saving: the same; for a thread that writes checkpoints while `everyone` is in use elsewhere.
    """

    pipeline: dist.ProcessGroup
    forward: Lanes
    backward: Lanes
    control: dist.ProcessGroup
    replica: dist.ProcessGroup
    ends: dist.ProcessGroup
    everyone: dist.ProcessGroup
    saving: dist.ProcessGroup


def connect_neighbours(topology: Topology, groups: Groups, device: torch.device) -> None:
    """Send one number over every pair of ranks and lane that steps use, in one order on all ranks.

    NCCL connects two ranks at the first message between them and blocks both until then. Within a step that could be a
    deadlock: with several stages on a rank, the first post of rank 0 may be a receive from the last rank, which first
    waits for what rank 0 sends.
    """
    here = topology.pipeline_rank
    for lanes, kind in ((groups.forward, "F"), (groups.backward, "B")):
        for source, destination, _ in (each for each in channels(topology.num_stages) if each.kind == kind):
            group = lanes.up if source < destination else lanes.down
            number = torch.zeros(1, device=device)
            if here == source:
                dist.send(number, topology.pipeline_ranks[destination], group=group)
            elif here == destination:
                dist.recv(number, topology.pipeline_ranks[source], group=group)


def channels(num_ranks: int) -> list[Channel]:
    """What plans with stages in a loop may send: activations to the next rank, gradients back, and around the loop."""
    ranks = range(num_ranks if num_ranks > 1 else 0)
    onward = [Channel(rank, (rank + 1) % num_ranks, "F") for rank in ranks]
    return onward + [Channel(channel.destination, channel.source, "B") for channel in onward]


def make_groups(topology: Topology, timeout: timedelta) -> Groups:
    """Create every group on every process in one order, as `torch.distributed.new_group` requires."""
    mine: dict[str, dist.ProcessGroup] = {}

    def add(name: str, ranks: tuple[int, ...], backend: str | None = None) -> None:
        group = dist.new_group(list(ranks), timeout=timeout, backend=backend)
        if topology.rank in ranks:
            mine[name] = group

    stages, world = topology.num_stages, topology.world_size
    for first in range(0, world, stages):
        pipeline = tuple(range(first, first + stages))
        for name in ("pipeline", "forward up", "forward down", "backward up", "backward down"):
            add(name, pipeline)
        add("control", pipeline, "gloo")
        ends = tuple(sorted({pipeline[0], pipeline[-1]}))
        add("ends", ends)
    for stage in range(stages):
        add("replica", tuple(range(stage, world, stages)))
    for name in ("everyone", "saving"):
        add(name, tuple(range(world)), "gloo")
    return Groups(
        pipeline=mine["pipeline"],
        forward=Lanes(mine["forward up"], mine["forward down"]),
        backward=Lanes(mine["backward up"], mine["backward down"]),
        control=mine["control"],
        replica=mine["replica"],
        ends=mine.get("ends", mine["pipeline"]),
        everyone=mine["everyone"],
        saving=mine["saving"],
    )
