"""A second opinion: the lowering and the simulation of torch.distributed.pipelining take our compute orders."""

from itertools import product

import pytest

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.policies import POLICIES

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
PRIVATE_NAMES = ("_Action", "_ComputationType", "_add_send_recv", "_simulate_comms_compute")
pytestmark = pytest.mark.skipif(
    not all(hasattr(torch_schedules, name) for name in PRIVATE_NAMES),
    reason="this torch has no private schedule validator",
)


def as_torch(plan: Plan, action: Action) -> object:
    """The action as torch knows it: a unit is a microbatch there."""
    kind = torch_schedules._ComputationType.from_str(action.kind.value)
    return torch_schedules._Action(action.stage, kind, action.unit.microbatch * plan.num_chunks + action.unit.chunk)


@pytest.mark.parametrize("schedule", POLICIES)
def test_torch_lowers_and_simulates_the_plan_without_a_stall(schedule: str) -> None:
    policy = POLICIES[schedule]
    chunk_counts = (1,) if policy.whole_rows else range(1, 5)
    virtual_stages = (1, 2) if policy.interleaves else (1,)
    for num_ranks, num_microbatches, num_chunks, v in product(range(1, 6), range(1, 4), chunk_counts, virtual_stages):
        plan = make_plan(schedule, num_ranks, num_microbatches, num_chunks, virtual_stages=v)
        compute = {rank: [as_torch(plan, action) for action in row] for rank, row in enumerate(plan.compute)}
        lowered = torch_schedules._add_send_recv(compute, plan.stage_to_rank.__getitem__, plan.num_stages)

        for rank, row in enumerate(plan.actions):
            assert sorted(map(str, lowered[rank])) == sorted(str(as_torch(plan, action)) for action in row)
        torch_schedules._simulate_comms_compute(lowered, plan.stage_to_rank.__getitem__, plan.num_stages)
