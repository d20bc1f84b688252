"""Stages are neighbours, replicas hold disjoint processes, and every process finds its groups."""

import itertools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from support.plans import plans
from support.processes import run_processes

from lightning_seq1f1b.runtime.topology import Topology, channels, connect_neighbours, make_groups
from lightning_seq1f1b.schedule.transfers import transfers


def test_ranks_of_one_pipeline_are_neighbours():
    places = [Topology(rank, 6, 3) for rank in range(6)]
    assert [(place.replica, place.pipeline_rank) for place in places] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert places[4].pipeline_ranks == (3, 4, 5)
    assert places[0].num_replicas == 2


@pytest.mark.parametrize(("world", "stages", "words"), [(4, 3, "multiple of num_stages"), (2, 0, "at least 1")])
def test_processes_that_do_not_divide_are_refused(world, stages, words):
    with pytest.raises(ValueError, match=words):
        Topology(0, world, stages)


def sums_of_ranks(rank, world_size, num_stages):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    groups = make_groups(Topology(rank, world_size, num_stages), timedelta(seconds=60))
    sums = {}
    everyone = {"pipeline": groups.pipeline, "control": groups.control, "replica": groups.replica}
    for direction in ("forward", "backward"):
        for way, group in getattr(groups, direction)._asdict().items():
            everyone[f"{direction} {way}"] = group
    for name, group in everyone.items():
        total = torch.tensor(rank)
        dist.all_reduce(total, group=group)
        sums[name] = int(total)
    sums["groups"] = len(set(everyone.values()))
    if rank % num_stages in (0, num_stages - 1):
        total = torch.tensor(rank)
        dist.all_reduce(total, group=groups.ends)
        sums["ends"] = int(total)
    return sums


def meet(rank, world_size, num_stages):
    """Connect, and then use every channel the other way around: nothing is left of the first messages."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    topology = Topology(rank, world_size, num_stages)
    groups = make_groups(topology, timedelta(seconds=60))
    connect_neighbours(topology, groups, torch.device("cpu"))
    got = []
    for source, destination, kind in reversed(channels(num_stages)):
        lanes = groups.forward if kind == "F" else groups.backward
        group, number = lanes.up if source < destination else lanes.down, torch.tensor(float(rank))
        if topology.pipeline_rank == source:
            dist.send(number, topology.pipeline_ranks[destination], group=group)
        elif topology.pipeline_rank == destination:
            dist.recv(number, topology.pipeline_ranks[source], group=group)
            got.append((source, kind, int(number) - topology.pipeline_ranks[0] == source))
    return got


@pytest.mark.parametrize(("world_size", "num_stages"), [(3, 3), (4, 2), (1, 1)])
def test_neighbours_are_connected_before_the_first_step(world_size, num_stages):
    for rank, got in enumerate(run_processes(meet, world_size, world_size, num_stages)):
        here = rank % num_stages
        expected = [(c.source, c.kind, True) for c in reversed(channels(num_stages)) if c.destination == here]
        assert got == expected


@given(plans(most_ranks=5))
def test_every_message_of_a_plan_takes_a_connected_channel(plan):
    rows = itertools.chain.from_iterable(plan.compute_rows)
    messages = transfers(rows, plan.stage_to_rank, plan.codes.num_indices, plan.codes.units_on_a_stage)
    assert {message.channel for message in messages} <= set(channels(plan.num_ranks))


def test_groups_reduce_over_the_right_processes():
    results = run_processes(sums_of_ranks, 6, 6, 3)
    for rank, sums in enumerate(results):
        topology = Topology(rank, 6, 3)
        for name in ("pipeline", "forward up", "forward down", "backward up", "backward down", "control"):
            assert sums[name] == sum(topology.pipeline_ranks)
        assert sums["groups"] == 7
        assert sums["replica"] == sum(range(topology.pipeline_rank, 6, 3))
        if topology.pipeline_rank != 1:
            assert sums["ends"] == topology.pipeline_ranks[0] + topology.pipeline_ranks[-1]
