"""Drawings, drawn here too."""

import re
from collections import Counter
from fractions import Fraction
from textwrap import dedent

import pytest

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.draw import LEGEND, draw, draw_together, legend, microbatch_letters
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


def test_weight_gradients_have_a_sign_of_their_own() -> None:
    expected = """
        rank 0  a0-a1-b0-...A1=b1-A0=a1~B1=B0=a0~b1~b0~
        rank 1  ...a0-a1-A1=b0-A0=b1-B1=B0=a1~a0~b1~b0~
        """
    rows = (
        ("0F0.0", 0), ("0F0.1", 1), ("0F1.0", 2), ("0I0.1", 4), ("0F1.1", 5), ("0I0.0", 6), ("0W0.1", 7),
        ("0I1.1", 8), ("0I1.0", 9), ("0W0.0", 10), ("0W1.1", 11), ("0W1.0", 12),
        ("1F0.0", 1), ("1F0.1", 2), ("1I0.1", 3), ("1F1.0", 4), ("1I0.0", 5), ("1F1.1", 6), ("1I1.1", 7),
        ("1I1.0", 8), ("1W0.1", 9), ("1W0.0", 10), ("1W1.1", 11), ("1W1.0", 12),
    )  # fmt: skip
    actions = [(Action.parse(text), start) for text, start in rows]
    events = [Event(action.stage, action, start, start + 1) for action, start in actions]
    assert draw(events, num_ranks=2) == dedent(expected).strip()


def test_stages_of_a_rank_are_marked() -> None:
    expected = """
        rank 0  a0--a0'-a0"-a0:3A0:3A0"=A0'=A0==
        """
    order = ("0F0.0", "1F0.0", "2F0.0", "3F0.0", "3B0.0", "2B0.0", "1B0.0", "0B0.0")
    events = [Event(0, Action.parse(text), time, time + 1) for time, text in enumerate(order)]
    assert draw(events, num_ranks=1) == dedent(expected).strip()


def test_every_action_of_an_interleaved_split_plan_is_drawn_once_with_its_label() -> None:
    plan = make_plan("interleaved_seq1f1b_zb", 2, 2, 3, virtual_stages=2)
    one = Fraction(1)
    picture = draw(simulate(plan, Costs(one, one, one, 3, virtual_stages=2)).timeline, 2, width=10_000)
    for row in picture.splitlines():
        cells = row.removeprefix("rank 0  ").removeprefix("rank 1  ")
        labels = Counter(re.findall(r"[a-zA-Z]\d'?~?", cells))
        units = [f"{letter}{chunk}{mark}" for letter in "ab" for chunk in range(3) for mark in ("", "'")]
        assert labels == {text: 1 for unit in units for text in (unit, unit.upper(), f"{unit}~")}


def test_the_legend_says_what_is_there() -> None:
    def legend_of(*texts: str) -> str:
        return legend([Event(0, Action.parse(text), 0, 1) for text in texts], num_ranks=2)

    assert legend_of("0F0.0", "1B0.0") == LEGEND
    split = legend_of("0F0.0", "1I0.0", "1W0.0")
    assert "A0 its input gradient" in split
    assert "a0~ its weight gradients" in split
    assert "A0 its backward" in legend_of("0B0.0", "1I0.0", "1W0.0")
    assert (
        legend_of("0F0.0", "5B0.0").splitlines()[1]
        == "a0 on the rank's stage 0, a0' on its stage 1, a0\" on its stage 2"
    )


def test_timelines_above_each_other_share_their_axis() -> None:
    expected = """
        from time 0
        slow
        rank 0  a0-------

        fast
        rank 0  a0A0.....

        from time 4.5
        slow
        rank 0  -------A0

        fast
        rank 0  .........
        """
    forward, backward = Action.parse("0F0.0"), Action.parse("0B0.0")
    slow = [Event(0, forward, 100.0, 108.0), Event(0, backward, 108.0, 109.0)]
    fast = [Event(0, forward, 7.0, 8.0), Event(0, backward, 8.0, 9.0)]
    assert draw_together({"slow": slow, "fast": fast}, 1, width=17) == dedent(expected).strip()


def test_one_short_action_does_not_stretch_the_drawing() -> None:
    """A measured step has outliers; here the scale is that of the others, an eighth at most."""
    events = [Event(0, Action.parse(f"0F{index}.0"), index, index + 1) for index in range(9)]
    events.append(Event(0, Action.parse("0F9.0"), 9, 9.001))
    assert len(draw(events, num_ranks=1, width=10_000)) == len("rank 0  ") + 9 * 16 + 1


@pytest.mark.parametrize(("index", "letters"), [(0, "a"), (25, "z"), (26, "aa"), (51, "az"), (52, "ba"), (702, "aaa")])
def test_letters(index: int, letters: str) -> None:
    assert microbatch_letters(index) == letters
