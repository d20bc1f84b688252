"""Drawings, drawn here too."""

from fractions import Fraction
from textwrap import dedent

import pytest

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.draw import draw, microbatch_letters
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import Costs, simulate
from lightning_seq1f1b.schedule.timeline import Event


def drawn(num_stages: int, num_microbatches: int, costs: Costs, width: int = 120) -> str:
    plan = make_plan("seq1f1b", num_stages, num_microbatches, costs.num_chunks)
    return draw(simulate(plan, costs).timeline, num_stages, width)


def test_longer_actions_take_more_columns() -> None:
    expected = """
        rank 0  a0a1b0....A1==b1A0==..B1==B0==
        rank 1  ..a0a1A1==b0A0==b1B1==B0==....
        """
    assert drawn(2, 2, Costs(Fraction(1), Fraction(1), Fraction(1), 2)) == dedent(expected).strip()


def test_the_shortest_action_has_room_for_its_label() -> None:
    expected = """
        rank 0  a0-A0
        """
    assert drawn(1, 1, Costs(3.0, 1.0, 1.0, 1)) == dedent(expected).strip()


def test_chunks_of_unequal_cost() -> None:
    expected = """
        rank 0  a0--a1......A1..A0==
        rank 1  ....a0--a1A1A0==....
        """
    costs = Costs(Fraction(1), Fraction(1), Fraction(0), 2, (2, 1))
    assert drawn(2, 1, costs) == dedent(expected).strip()


def test_a_long_timeline_goes_on_below() -> None:
    expected = """
        from time 0
        rank 0  a0a1b0....
        rank 1  ..a0a1A1==

        from time 2.5
        rank 0  A1==b1A0==
        rank 1  b0A0==b1B1

        from time 5
        rank 0  ..B1==B0==
        rank 1  ==B0==....
        """
    assert drawn(2, 2, Costs(Fraction(1), Fraction(1), Fraction(1), 2), width=18) == dedent(expected).strip()


def test_many_microbatches_and_chunks_have_longer_labels() -> None:
    action = Action.parse("0F27.10")
    later = Action.parse("0B0.3")
    assert draw([Event(0, action, 0, 1), Event(0, later, 1, 2)], num_ranks=1) == "rank 0  ab10A3=="


def test_a_measured_timeline_starts_where_it_starts() -> None:
    events = [
        Event(0, Action.parse("0F0.0"), 100.25, 100.5),
        Event(0, Action.parse("0SEND_F0.0"), 100.5, 100.75),
        Event(1, Action.parse("1F0.0"), 100.75, 101.0),
    ]
    assert draw(events, num_ranks=2) == "rank 0  a0....\nrank 1  ....a0"


def test_very_different_times_stay_drawable() -> None:
    events = [Event(0, Action.parse("0F0.0"), 0, 1e-9), Event(0, Action.parse("0B0.0"), 1e-9, 1)]
    assert len(draw(events, num_ranks=1)) < 10_000


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw([Event(0, Action.parse("0SEND_F0.0"), 0, 1), Event(0, Action.parse("0F0.0"), 1, 1)], num_ranks=1)


@pytest.mark.parametrize(("index", "letters"), [(0, "a"), (25, "z"), (26, "aa"), (51, "az"), (52, "ba"), (702, "aaa")])
def test_letters(index: int, letters: str) -> None:
    assert microbatch_letters(index) == letters
