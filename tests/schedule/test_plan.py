"""Plans are made for all ranks, kept, and refused with the knob to turn."""

import pytest

from lightning_seq1f1b.schedule import plan as plan_module
from lightning_seq1f1b.schedule.actions import Kind
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.plan_error import PlanError
from lightning_seq1f1b.schedule.policies import POLICIES, ComputeOrders


@pytest.mark.parametrize("schedule", POLICIES)
def test_plan_describes_itself(schedule: str) -> None:
    plan = make_plan(schedule, 3, 2, 1)
    assert (plan.schedule, plan.num_stages, plan.num_microbatches, plan.num_chunks) == (schedule, 3, 2, 1)
    assert plan.stage_to_rank == (0, 1, 2)
    assert plan.trains == any(action.kind is Kind.B for row in plan.compute for action in row)


def test_the_same_plan_is_made_once() -> None:
    assert make_plan("seq1f1b", 3, 2, 2) is make_plan("seq1f1b", 3, 2, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seq1f1", "expected one of 'seq1f1b', '1f1b', 'gpipe', 'forward'; did you mean 'seq1f1b'?"),
        ("Gpipe", "unknown schedule 'Gpipe', .*; did you mean 'gpipe'?"),
        ("zzz", "unknown schedule 'zzz', .* 'forward'$"),
    ],
)
def test_unknown_schedules_are_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        make_plan(name, 2, 2, 2)


@pytest.mark.parametrize("knob", ["num_stages", "num_microbatches", "num_chunks"])
def test_numbers_below_one_are_refused(knob: str) -> None:
    numbers = {"num_stages": 2, "num_microbatches": 2, "num_chunks": 2, knob: 0}
    with pytest.raises(ValueError, match=f"{knob} must be at least 1, not 0"):
        make_plan("seq1f1b", **numbers)


def test_a_policy_that_stalls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks_disagree(num_stages: int, num_microbatches: int, num_chunks: int) -> ComputeOrders:
        one_by_one = POLICIES["1f1b"](1, num_microbatches, num_chunks)
        all_at_once = POLICIES["gpipe"](num_stages, num_microbatches, num_chunks)
        return (*one_by_one, *all_at_once[1:])

    monkeypatch.setitem(plan_module.POLICIES, "ranks_disagree", ranks_disagree)
    with pytest.raises(
        PlanError, match=r"the plan stalls: rank 0 waits at 0B0\.0 for 1SEND_B0\.0; rank 1 waits at 1F1\.0"
    ):
        make_plan("ranks_disagree", 2, 2, 1)


def test_plans_are_values() -> None:
    plan = make_plan("seq1f1b", 2, 2, 2)
    again = make_plan.__wrapped__("seq1f1b", 2, 2, 2)
    assert again is not plan
    assert again == plan
    assert hash(again) == hash(plan)
    assert isinstance(plan, Plan)
