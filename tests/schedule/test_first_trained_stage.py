"""Plans whose first stages train nothing: no backward and no gradient's message is left of them, and all else stays."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.memory_curve import UnitSizes, memory_over_time, peaks
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.plan_error import PlanError
from lightning_seq1f1b.schedule.simulate import Costs, simulate
from lightning_seq1f1b.schedule.verify import verify

SCHEDULES = ("seq1f1b", "seq1f1b_zb", "gpipe", "interleaved_seq1f1b", "interleaved_seq1f1b_zb")
BACKWARDS = {Kind.B, Kind.I, Kind.W}


def plans_with_and_without() -> list[tuple[Plan, Plan]]:
    pairs = []
    for schedule, num_ranks, chunks in product(SCHEDULES, (1, 2, 3), ((2, 2), (4, 2, 1))):
        virtual_stages = 2 if schedule.startswith("interleaved") else 1
        for first in range(1, num_ranks * virtual_stages):
            given = (schedule, num_ranks, len(chunks), chunks)
            pairs.append(
                (
                    make_plan(*given, virtual_stages=virtual_stages, first_trained_stage=first),
                    make_plan(*given, virtual_stages=virtual_stages),
                )
            )
    return pairs


def stays(action: Action, first: int) -> bool:
    """What the words say: forwards everywhere, backwards from the first trained stage on, gradients to it or later."""
    if action.kind is Kind.SEND_B:
        return action.stage > first
    return action.stage >= first or action.kind not in {*BACKWARDS, Kind.RECV_B}


def test_exactly_the_backwards_of_untrained_stages_and_their_messages_are_gone() -> None:
    for plan, full in plans_with_and_without():
        assert plan.first_trained_stage > 0
        for row, full_row in zip(plan.actions, full.actions, strict=True):
            left = [action for action in full_row if stays(action, plan.first_trained_stage)]
            assert sorted(row) == sorted(left)
            compute = [action for action in row if action.computes]
            assert compute == [action for action in left if action.computes]


def test_a_step_is_no_longer_and_holds_no_more() -> None:
    for plan, full in plans_with_and_without():
        simulation, before = (simulate(each, Costs(1, 1, 1, each.num_chunks)) for each in (plan, full))
        assert simulation.makespan <= before.makespan
        assert all(one <= other for one, other in zip(simulation.peak_units, before.peak_units, strict=True))
        sizes = UnitSizes.one_each(plan.num_stages, plan.num_chunks)
        assert tuple(peaks(plan, sizes)) == simulation.peak_units
        if plan.num_ranks == plan.num_stages:
            assert simulation.peak_units[: plan.first_trained_stage] == (1,) * plan.first_trained_stage
        curves = memory_over_time(simulation.timeline, plan.num_ranks, sizes)
        assert [curve[-1][1] for curve in curves] == [0] * plan.num_ranks


def test_a_backward_of_an_untrained_stage_or_a_lacking_one_is_refused() -> None:
    full = make_plan("seq1f1b", 3, 2, 2)
    with pytest.raises(PlanError, match="has no place in schedule"):
        verify(replace(full, first_trained_stage=1))
    with pytest.raises(PlanError, match="lacks"):
        verify(replace(make_plan("seq1f1b", 3, 2, 2, first_trained_stage=2), first_trained_stage=1))


def test_a_stage_that_does_not_exist_is_refused() -> None:
    for first in (-1, 4):
        with pytest.raises(ValueError, match=f"first_trained_stage={first} is none of 4 stages"):
            make_plan("interleaved_seq1f1b", 2, 1, 2, virtual_stages=2, first_trained_stage=first)
