"""A second opinion: the lowering and the simulation of torch.distributed.pipelining take our compute orders."""

from itertools import product

import pytest

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.plan import make_plan

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
PRIVATE_NAMES = ("_Action", "_ComputationType", "_add_send_recv", "_simulate_comms_compute")
pytestmark = pytest.mark.skipif(
    not all(hasattr(torch_schedules, name) for name in PRIVATE_NAMES),
    reason="this torch has no private schedule validator",
)


@pytest.mark.parametrize("schedule", ["seq1f1b", "gpipe", "1f1b", "forward"])
def test_torch_lowers_and_simulates_the_plan_without_a_stall(schedule: str) -> None:
    kinds = torch_schedules._ComputationType
    chunk_counts = (1,) if schedule == "1f1b" else range(1, 5)
    for num_stages, num_microbatches, num_chunks in product(range(1, 6), range(1, 5), chunk_counts):

        def unit_as_microbatch(action: Action, num_chunks: int = num_chunks) -> object:
            index = action.unit.microbatch * num_chunks + action.unit.chunk
            return torch_schedules._Action(action.stage, kinds.from_str(action.kind.value), index)

        plan = make_plan(schedule, num_stages, num_microbatches, num_chunks)
        compute = {rank: [unit_as_microbatch(action) for action in row] for rank, row in enumerate(plan.compute)}
        lowered = torch_schedules._add_send_recv(compute, plan.stage_to_rank.__getitem__, num_stages)

        for rank, row in enumerate(plan.actions):
            assert sorted(map(str, lowered[rank])) == sorted(str(unit_as_microbatch(action)) for action in row)
        torch_schedules._simulate_comms_compute(lowered, plan.stage_to_rank.__getitem__, num_stages)
