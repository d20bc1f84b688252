"""Gradients set aside come back, norms and averages equal those of one process."""

import pytest
import torch
import torch.distributed as dist
from support.processes import run_processes
from torch import nn

from lightning_seq1f1b.runtime.copied_gradients import CopiedGradients
from lightning_seq1f1b.runtime.gradients import GradientStash, deliver, pipeline_norm
from lightning_seq1f1b.runtime.replica_gradients import ReplicaAverage


def parameter(value, grad=None):
    result = nn.Parameter(torch.tensor(value))
    result.grad = None if grad is None else torch.tensor(grad)
    return result


@pytest.mark.parametrize(("keep", "expected"), [(True, [11.0, 2.0]), (False, [10.0, None])])
def test_stash_delivers_on_top_of_what_was_kept(keep, expected):
    parameters = [parameter(0.0, 1.0), parameter(0.0, 2.0)]
    stash = GradientStash(parameters)
    stash.set_aside(keep=keep)
    assert [p.grad for p in parameters] == [None, None]
    parameters[0].grad = torch.tensor(20.0)
    fresh = stash.take()
    assert parameters[0].grad == (torch.tensor(1.0) if keep else None)
    deliver(fresh, torch.tensor(0.5))
    assert fresh == []
    assert [None if p.grad is None else float(p.grad) for p in parameters] == expected


def collective(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    group = dist.group.WORLD
    tied, replicated, frozen = parameter(0.0, 1.0 + rank), parameter(0.0), parameter(0.0)
    frozen.requires_grad_(False)
    if rank == 0:
        replicated.grad = torch.tensor(6.0)
    unused, used_on_one = parameter(0.0), parameter(0.0, 5.0 if rank else None)
    copied = CopiedGradients([tied, unused, used_on_one], group).summed()
    assert [each for each, _ in copied] == [tied, used_on_one]
    assert float(copied[1][1]) == 5.0
    assert tied.grad is None
    deliver(copied, torch.tensor(1.0))
    average = ReplicaAverage(group)
    average.launch([replicated, unused, frozen])
    average.finish()
    assert unused.grad is None
    counted = [torch.tensor([3.0, 0.0])] if rank == 0 else [torch.tensor([4.0])]
    norm = pipeline_norm(counted, group, torch.device("cpu"))
    nothing_here = pipeline_norm([] if rank else [torch.tensor([2.0])], group, torch.device("cpu"))
    return float(tied.grad), float(replicated.grad), frozen.grad, float(norm), float(nothing_here)


def test_collectives_over_two_processes():
    assert run_processes(collective, 2) == [(3.0, 3.0, None, 5.0, 2.0)] * 2
