"""The compute orders, drawn as in their docstrings."""

from fractions import Fraction
from textwrap import dedent

import pytest

from lightning_seq1f1b.schedule import policies
from lightning_seq1f1b.schedule.actions import Action, Kind, Unit
from lightning_seq1f1b.schedule.draw import draw
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import Costs, simulate


def picture(schedule: str, num_stages: int, num_microbatches: int, num_chunks: int) -> str:
    """The plan with forwards and backwards of one time unit each."""
    plan = make_plan(schedule, num_stages, num_microbatches, num_chunks)
    costs = Costs(Fraction(1), Fraction(1), Fraction(0), num_chunks)
    return draw(simulate(plan, costs).timeline, num_stages)


PICTURES = {
    ("forward", 3, 2, 2): """
        rank 0  a0a1b0b1....
        rank 1  ..a0a1b0b1..
        rank 2  ....a0a1b0b1
        """,
    ("gpipe", 3, 2, 2): """
        rank 0  a0a1b0b1........A1A0B1B0
        rank 1  ..a0a1b0b1....A1A0B1B0..
        rank 2  ....a0a1b0b1A1A0B1B0....
        """,
    ("seq1f1b", 3, 3, 2): """
        rank 0  a0a1b0b1....A1c0A0c1B1..B0..C1C0
        rank 1  ..a0a1b0..A1b1A0c0B1c1B0..C1C0..
        rank 2  ....a0a1A1b0A0b1B1c0B0c1C1C0....
        """,
    ("1f1b", 3, 4, 1): """
        rank 0  a0b0c0....A0d0B0..C0..D0
        rank 1  ..a0b0..A0c0B0d0C0..D0..
        rank 2  ....a0A0b0B0c0C0d0D0....
        """,
}


@pytest.mark.parametrize("request_", PICTURES, ids=lambda request_: request_[0])
def test_picture(request_: tuple[str, int, int, int]) -> None:
    assert picture(*request_) == dedent(PICTURES[request_]).strip()


@pytest.mark.parametrize("request_", PICTURES, ids=lambda request_: request_[0])
def test_docstring_shows_the_picture(request_: tuple[str, int, int, int]) -> None:
    docstrings = "\n".join(
        line.strip() for function in (policies.mix, policies.forward_only) for line in function.__doc__.splitlines()
    )
    assert dedent(PICTURES[request_]).strip() in docstrings


def test_more_stages_than_work_warm_up_with_all_forwards() -> None:
    plan = make_plan("seq1f1b", 4, 1, 2)
    assert [" ".join(map(str, order)) for order in plan.compute] == [
        "0F0.0 0F0.1 0B0.1 0B0.0",
        "1F0.0 1F0.1 1B0.1 1B0.0",
        "2F0.0 2F0.1 2B0.1 2B0.0",
        "3F0.0 3F0.1 3B0.1 3B0.0",
    ]


def test_one_stage_finishes_a_microbatch_before_the_next() -> None:
    (order,) = make_plan("1f1b", 1, 3, 1).compute
    assert order == tuple(map(Action.parse, ["0F0.0", "0B0.0", "0F1.0", "0B1.0", "0F2.0", "0B2.0"]))


def test_backwards_add_up_in_one_order() -> None:
    """So the schedules agree to the last bit, with weight gradients in the same order too."""

    def backwards(schedule: str, virtual_stages: int = 1) -> list[list[tuple[int, Unit]]]:
        plan = make_plan(schedule, 3, 4, 2, virtual_stages=virtual_stages)
        kinds = (Kind.W,) if plan.splits_backward else (Kind.B,)
        return [[(action.stage, action.unit) for action in order if action.kind in kinds] for order in plan.compute]

    assert backwards("gpipe") == backwards("seq1f1b") == backwards("seq1f1b_zb")
    assert backwards("interleaved_seq1f1b", 2) == backwards("interleaved_seq1f1b_zb", 2)


def test_interleaving_with_one_stage_on_a_rank_changes_nothing() -> None:
    assert make_plan("interleaved_seq1f1b", 3, 2, 4).compute == make_plan("seq1f1b", 3, 2, 4).compute
    assert make_plan("interleaved_seq1f1b_zb", 3, 2, 4).compute == make_plan("seq1f1b_zb", 3, 2, 4).compute


def test_a_group_goes_through_all_stages_of_a_rank_before_the_next() -> None:
    order, _ = make_plan("forward", 2, 2, 2, virtual_stages=2).compute
    assert " ".join(map(str, order)) == "0F0.0 0F0.1 2F0.0 2F0.1 0F1.0 0F1.1 2F1.0 2F1.1"


def test_groups_take_as_many_microbatches_as_give_every_rank_a_unit() -> None:
    order = make_plan("forward", 3, 5, 2, virtual_stages=2).compute[0]
    groups = [[int(a.unit.microbatch) for a in order if a.stage == stage and a.unit.chunk == 0] for stage in (0, 3)]
    assert groups == [[0, 1, 2, 3, 4]] * 2
    assert " ".join(str(action.stage) for action in order) == "0 0 0 0 0 0 3 3 3 3 3 3 0 0 0 0 3 3 3 3"
