"""Plans are made for all ranks, kept, and refused with the knob to turn."""

from dataclasses import replace

import pytest

from lightning_seq1f1b.schedule.actions import Kind
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.policies import POLICIES


@pytest.mark.parametrize("schedule", POLICIES)
def test_plan_describes_itself(schedule: str) -> None:
    virtual_stages = 2 if POLICIES[schedule].interleaves else 1
    plan = make_plan(schedule, 3, 2, 1, virtual_stages=virtual_stages)
    assert (plan.schedule, plan.num_ranks, plan.num_microbatches, plan.num_chunks) == (schedule, 3, 2, 1)
    assert (plan.virtual_stages, plan.num_stages) == (virtual_stages, 3 * virtual_stages)
    assert plan.stage_to_rank == (0, 1, 2) * virtual_stages
    kinds = {action.kind for row in plan.compute for action in row}
    assert plan.trains == (kinds != {Kind.F})
    assert plan.splits_backward == (kinds == {Kind.F, Kind.I, Kind.W})


@pytest.mark.parametrize("schedule", POLICIES)
def test_actions_of_one_rank_are_its_row(schedule: str) -> None:
    plan = make_plan(schedule, 3, 2, 1)
    assert tuple(map(plan.actions_of, range(3))) == plan.actions


def test_the_same_plan_is_made_once() -> None:
    assert make_plan("seq1f1b", 3, 2, 2) is make_plan("seq1f1b", 3, 2, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seq1f1", "expected one of 'seq1f1b', .*; did you mean 'seq1f1b'?"),
        ("interleaved_zb", "did you mean 'interleaved_1f1b'?"),
        ("Gpipe", "unknown schedule 'Gpipe', .*; did you mean 'gpipe'?"),
        ("zzz", "unknown schedule 'zzz', .* 'forward'$"),
    ],
)
def test_unknown_schedules_are_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        make_plan(name, 2, 2, 2)


@pytest.mark.parametrize(
    "knob", ["num_ranks", "num_microbatches", "num_chunks", "virtual_stages", "memory_knob", "activation_cap"]
)
def test_numbers_below_one_are_refused(knob: str) -> None:
    numbers = {"num_ranks": 2, "num_microbatches": 2, "num_chunks": 2, knob: 0}
    with pytest.raises(ValueError, match=f"{knob} must be at least 1, not 0"):
        make_plan("seq1f1b", **numbers)


@pytest.mark.parametrize(
    ("schedule", "knobs", "message"),
    [
        ("1f1b", {"num_chunks": 2}, "num_chunks is 2; set num_chunks=1, or use schedule='seq1f1b', the same on chunks"),
        ("zb1p", {"num_chunks": 3}, "or use schedule='seq1f1b_zb', the same on chunks"),
        ("interleaved_1f1b", {"num_chunks": 3}, "or use schedule='interleaved_seq1f1b', the same on chunks"),
        ("seq1f1b", {"virtual_stages": 2}, "virtual_stages is 2; set virtual_stages=1, .*'interleaved_seq1f1b'$"),
        ("seq1f1b_zb", {"virtual_stages": 2}, "or use schedule='interleaved_seq1f1b_zb'$"),
        ("1f1b", {"virtual_stages": 2, "num_chunks": 1}, "or use schedule='interleaved_1f1b'$"),
        ("gpipe", {"memory_knob": 2}, "memory_knob has no effect on schedule 'gpipe'"),
        ("gpipe", {"activation_cap": 3}, "holds all 12 units of a rank at once; set activation_cap=12"),
        ("seq1f1b", {"activation_cap": 3}, "activation_cap=3 is below 4, .*; set activation_cap=4 or more"),
        (
            "interleaved_seq1f1b_zb",
            {"activation_cap": 7, "virtual_stages": 2},
            "activation_cap=7 is below 8, .*; set activation_cap=8 or more",
        ),
    ],
)
def test_knobs_that_do_not_fit_the_schedule_are_refused(schedule: str, knobs: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(schedule, 2, 3, knobs.pop("num_chunks", 4), **knobs)


def test_a_knob_that_deadlocks_is_refused_with_the_nearest_that_works() -> None:
    with pytest.raises(ValueError, match=r"memory_knob=3 does not work .* nearest that does is memory_knob=2"):
        make_plan("interleaved_seq1f1b", 4, 3, 4, virtual_stages=4, memory_knob=3)
    make_plan("interleaved_seq1f1b", 4, 3, 4, virtual_stages=4, memory_knob=2)


def test_plans_are_values() -> None:
    plan = make_plan("seq1f1b", 2, 2, 2)
    assert make_plan("seq1f1b", 2, 2, 2) is plan
    again = replace(plan)
    assert again is not plan
    assert again == plan
    assert hash(again) == hash(plan)
    assert isinstance(plan, Plan)
