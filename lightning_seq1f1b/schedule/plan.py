"""A plan: what every rank does in one step, as data, checked for all ranks together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.lowering import lower
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.suggest import unknown
from lightning_seq1f1b.schedule.verify import verify


@dataclass(frozen=True)
class Plan:
    """The actions of all ranks for one step.

    Attributes:
        schedule: name of the policy that ordered the compute actions.
        num_stages: stages of the model.
        num_microbatches: microbatches of the step.
        num_chunks: chunks of every microbatch.
        stage_to_rank: the rank of every stage.
        compute: compute actions of every rank, in order.
        actions: all actions of every rank, in order: `compute` with its sends and receives.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    stage_to_rank: tuple[int, ...]
    compute: tuple[tuple[Action, ...], ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def trains(self) -> bool:
        """Whether the plan has backwards; only the schedule `forward` has none."""
        return self.schedule != "forward"


@lru_cache(maxsize=64)
def make_plan(schedule: str, num_stages: int, num_microbatches: int, num_chunks: int) -> Plan:
    """Order, lower and verify a plan with one stage on a rank.

    The plan is checked for all ranks, so that every rank refuses a bad one before any communication.

    Args:
        schedule: a name in `policies.POLICIES`.
        num_stages: stages of the model, one on a rank.
        num_microbatches: microbatches of the step.
        num_chunks: chunks of every microbatch.

    Raises:
        ValueError: for an unknown schedule, a number below 1, or a number that the schedule does not support.
    """
    if schedule not in POLICIES:
        raise ValueError(unknown("schedule", schedule, POLICIES))
    for knob, number in (
        ("num_stages", num_stages),
        ("num_microbatches", num_microbatches),
        ("num_chunks", num_chunks),
    ):
        if number < 1:
            raise ValueError(f"{knob} must be at least 1, not {number}")
    compute = POLICIES[schedule](num_stages, num_microbatches, num_chunks)
    stage_to_rank = tuple(range(num_stages))
    plan = Plan(
        schedule=schedule,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        stage_to_rank=stage_to_rank,
        compute=compute,
        actions=lower(compute, stage_to_rank, num_chunks),
    )
    verify(plan)
    return plan
