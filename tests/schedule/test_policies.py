"""The compute orders, drawn as in their docstrings."""

from collections.abc import Callable
from fractions import Fraction
from textwrap import dedent

import pytest

from lightning_seq1f1b.schedule import policies
from lightning_seq1f1b.schedule.actions import Action
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
    policy = policies.POLICIES[request_[0]]
    assert dedent(PICTURES[request_]).strip() in dedent_docstring(policy)
    for count, word in zip(request_[1:], ("stage", "microbatch", "chunk"), strict=True):
        assert f"{count} {word}" in dedent_docstring(policy)


def dedent_docstring(policy: Callable[..., object]) -> str:
    lines = (policy.__doc__ or "").splitlines()
    return "\n".join(line.strip() for line in lines)


def test_more_stages_than_work_warm_up_with_all_forwards() -> None:
    orders = policies.seq1f1b(4, 1, 2)
    assert [" ".join(map(str, order)) for order in orders] == [
        "0F0.0 0F0.1 0B0.1 0B0.0",
        "1F0.0 1F0.1 1B0.1 1B0.0",
        "2F0.0 2F0.1 2B0.1 2B0.0",
        "3F0.0 3F0.1 3B0.1 3B0.0",
    ]


def test_one_stage_finishes_a_microbatch_before_the_next() -> None:
    (order,) = policies.one_f_one_b(1, 3, 1)
    assert order == tuple(map(Action.parse, ["0F0.0", "0B0.0", "0F1.0", "0B1.0", "0F2.0", "0B2.0"]))


def test_backwards_add_up_in_one_order() -> None:
    def backwards(policy: policies.Policy) -> list[list[Action]]:
        return [[action for action in order if action.kind.value == "B"] for order in policy(3, 4, 2)]

    assert backwards(policies.gpipe) == backwards(policies.seq1f1b)


def test_1f1b_on_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_chunks is 2; set num_chunks=1, or use schedule='seq1f1b'"):
        policies.one_f_one_b(2, 2, 2)
