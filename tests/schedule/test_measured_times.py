"""Measured times: what a simulation with them gives back, and when they do not stand for a plan."""

import pytest

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.measured_times import measured_times
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import simulate
from lightning_seq1f1b.schedule.timeline import Event
from lightning_seq1f1b.schedule.timeline_file import Recording
from lightning_seq1f1b.schedule.unit_times import UnitTimes


def test_simulating_with_the_times_of_a_simulation_repeats_it() -> None:
    times = UnitTimes(((1.0, 2.0), (3.0, 1.5)), ((2.5, 1.0), (0.5, 2.0)), ((0.25, 1.0), (1.0, 0.75)))
    for schedule in ("seq1f1b_zb", "seq1f1b"):
        plan = make_plan(schedule, 2, 3, 2, times=times)
        simulation = simulate(plan, times)
        recording = Recording(simulation.timeline)
        taken = measured_times(recording, 2, 2, splits_backward=plan.splits_backward)
        assert simulate(plan, taken).timeline == simulation.timeline
        if plan.splits_backward:
            assert taken == times


def test_the_median_of_the_microbatches_is_taken() -> None:
    lengths = {"0F0.0": 1.0, "0F1.0": 9.0, "0F2.0": 2.0, "0B0.0": 4.0, "0B1.0": 5.0, "0B2.0": 60.0}
    recording = Recording(tuple(Event(0, Action.parse(text), 10.0, 10.0 + length) for text, length in lengths.items()))
    assert measured_times(recording, 1, 1, splits_backward=False) == UnitTimes(((2.0,),), ((5.0,),), ((0,),))


def test_times_of_another_plan_are_refused() -> None:
    recording = Recording((Event(0, Action.parse("0F0.0"), 0.0, 1.0), Event(0, Action.parse("0B0.0"), 1.0, 2.0)))
    with pytest.raises(ValueError, match="those of 1 stages and 1 chunks, not of 2 and 4"):
        measured_times(recording, 2, 4, splits_backward=False)
    with pytest.raises(ValueError, match="were not split"):
        measured_times(recording, 1, 1, splits_backward=True)
