"""Gradients set aside come back, norms and averages equal those of one process."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
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


@given(
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.floats(0.25, 4.0),
    st.lists(st.lists(st.floats(-4.0, 4.0, width=16), min_size=3, max_size=3), min_size=1, max_size=5),
    st.one_of(st.none(), st.lists(st.floats(-4.0, 4.0, width=16), min_size=3, max_size=3)),
)
def test_delivery_rounds_a_steps_sum_once(dtype, keep, factor, units, before):
    """Whatever was there and whatever the factor is; `.grad` has the parameter's dtype before and after."""
    weight, unused = (nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2))
    weight.grad = None if before is None else torch.tensor(before, dtype=dtype)
    unused.grad = torch.ones(3, dtype=dtype)
    stash = GradientStash([weight, unused])
    stash.set_aside(keep=keep)
    for unit in units:
        (weight * torch.tensor(unit, dtype=dtype)).sum().backward()
    fresh = stash.take()
    assert {parameter.grad_dtype for parameter in (weight, unused)} == {dtype}
    assert (weight.grad is None) == (before is None or not keep)
    deliver(fresh, torch.tensor(factor))
    wide = torch.promote_types(dtype, torch.float32)
    wanted = factor * torch.tensor(units, dtype=dtype).double().sum(0)
    if keep and before is not None:
        wanted += torch.tensor(before, dtype=dtype).double()
    assert weight.grad.dtype == dtype
    one_rounding = torch.finfo(dtype).eps / 2
    sums = 50 * torch.finfo(wide if dtype != torch.float64 else torch.float32).eps  # the factor is float32
    torch.testing.assert_close(weight.grad.double(), wanted, rtol=1.01 * one_rounding, atol=sums + 1e-7)
    assert (unused.grad is not None) == keep


@pytest.mark.parametrize("chosen", [torch.float32, None])
def test_delivery_follows_a_dtype_that_the_user_has_chosen(chosen):
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    weight.grad_dtype = chosen
    stash = GradientStash([weight])
    for _ in range(2):
        stash.set_aside(keep=True)
        weight.grad = torch.tensor([1.0 + 2.0**-12])
        deliver(stash.take(), torch.tensor(1.0))
    assert weight.grad.item() == 2.0 + 2.0**-11


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
