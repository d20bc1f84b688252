"""Stages are neighbours, replicas hold disjoint processes, and every process finds its groups."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.processes import run_processes

from lightning_seq1f1b.runtime.topology import Topology, make_groups


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
