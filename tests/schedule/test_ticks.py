"""Ticks: the same times, and the same step."""

from fractions import Fraction

from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import simulate
from lightning_seq1f1b.schedule.ticks import in_ticks
from lightning_seq1f1b.schedule.unit_times import UnitTimes


def test_a_step_in_ticks_is_the_step() -> None:
    third, half = Fraction(1, 3), Fraction(1, 2)
    times = UnitTimes(((third, half), (1, half)), ((1, third), (half, half)), ((0, 0), (Fraction(1, 7), 1)))
    counted, latency, ticks = in_ticks(times, Fraction(1, 5))
    assert ticks == 210
    assert all(
        isinstance(time, int) for table in (counted.forward, counted.weight_grad) for row in table for time in row
    )
    plan = make_plan("seq1f1b_zb", 2, 2, 2)
    exact, fast = simulate(plan, times, Fraction(1, 5)), simulate(plan, counted, latency)
    assert exact.makespan == Fraction(fast.makespan, ticks)
    assert [event.start for event in exact.timeline] == [Fraction(event.start, ticks) for event in fast.timeline]


def test_floats_stay() -> None:
    times = UnitTimes(((0.1,),), ((0.2,),), ((Fraction(1, 3),),))
    assert in_ticks(times, 0) == (times, 0, 1)
