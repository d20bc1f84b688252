"""The CSV, read and judged by torch.distributed.pipelining itself."""

import csv
from io import StringIO

import pytest

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.torch_csv import torch_csv

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
PRIVATE_NAMES = ("_Action", "_validate_schedule", "_simulate_comms_compute")
needs_torch = pytest.mark.skipif(
    not all(hasattr(torch_schedules, name) for name in PRIVATE_NAMES),
    reason="this torch has no private schedule validator",
)

SCHEDULES = [
    ("1f1b", 1),
    ("seq1f1b", 1),
    ("gpipe", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_seq1f1b", 3),
    ("zb1p", 1),
    ("interleaved_seq1f1b_zb", 2),
]


def read_by_torch(text: str) -> dict[int, list[object]]:
    rows = csv.reader(StringIO(text))
    return {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}


@needs_torch
@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (3, 5), (4, 8)])
def test_torch_accepts_the_compute_order(
    schedule: str, virtual_stages: int, num_ranks: int, num_microbatches: int
) -> None:
    plan = make_plan(schedule, num_ranks, num_microbatches, 1, virtual_stages=virtual_stages)
    order = read_by_torch(torch_csv(plan.compute))
    stage_to_rank = torch_schedules._validate_schedule(order, num_ranks, plan.num_stages, num_microbatches)
    assert stage_to_rank == dict(enumerate(plan.stage_to_rank))


@needs_torch
@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 2), (3, 5), (4, 8)])
def test_torch_plays_the_sends_and_receives_to_the_end(
    schedule: str, virtual_stages: int, num_ranks: int, num_microbatches: int
) -> None:
    plan = make_plan(schedule, num_ranks, num_microbatches, 1, virtual_stages=virtual_stages)
    actions = read_by_torch(torch_csv(plan.actions))
    assert [len(row) for row in actions.values()] == [len(row) for row in plan.actions]
    played = torch_schedules._simulate_comms_compute(actions, plan.stage_to_rank.__getitem__, plan.num_stages)
    assert [sorted(str(action) for action in row if action) for row in played.values()] == [
        sorted(f"{action.stage}{action.kind.value}{action.unit.microbatch}" for action in row) for row in plan.actions
    ]


def test_receives_stand_before_what_needs_them_in_the_order_of_their_channel() -> None:
    texts = ("1RECV_F0.0", "1RECV_F1.0", "1RECV_B0.0", "1F1.0", "1SEND_F1.0", "1F0.0", "1B0.0")
    assert torch_csv([map(Action.parse, texts)]) == "1RECV_F0,1RECV_F1,1F1,1SEND_F1,1F0,1RECV_B0,1B0\n"


def test_cells_name_stage_kind_and_microbatch() -> None:
    plan = make_plan("1f1b", 2, 2, 1)
    assert torch_csv(plan.compute) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no place for a chunk, and here is 0F0\.1; set num_chunks=1"):
        torch_csv(make_plan("seq1f1b", 2, 2, 2).compute)
