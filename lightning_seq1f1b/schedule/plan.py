"""A plan: what every rank does in one step, as data, checked for all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.codes import Codes, F, W
from lightning_seq1f1b.schedule.compute_orders import ComputeOrders, StallError, compute_orders
from lightning_seq1f1b.schedule.lowering import lower
from lightning_seq1f1b.schedule.plan_error import PlanError
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.suggest import unknown
from lightning_seq1f1b.schedule.unit_orders import UnitOrders
from lightning_seq1f1b.schedule.unit_times import StepTimes
from lightning_seq1f1b.schedule.verify import verify


@dataclass(frozen=True)
class Plan:
    """The actions of all ranks for one step.

    Attributes:
        schedule: name of the policy that ordered the compute actions.
        chunks: chunks of each microbatch of the step.
        stage_to_rank: the rank of every stage.
        rows: all actions of every rank, in order, as `codes` numbers them.
        trains: whether it has backwards.
        splits_backward: whether each backward is an I and a W. The W may run elsewhere than where they stand, see
            `activation_cap`; everything else keeps its order.
        activation_cap: most units whose activations a rank may hold, from F to the end of B, or of W; None for no
            limit.
        first_trained_stage: stages before it train nothing: they have forwards only, and nobody sends them gradients.
    """

    schedule: str
    chunks: tuple[int, ...]
    stage_to_rank: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    trains: bool = True
    splits_backward: bool = False
    activation_cap: int | None = None
    first_trained_stage: int = 0

    def trains_stage(self, stage: int) -> bool:
        """Whether a stage has backwards."""
        return self.trains and stage >= self.first_trained_stage

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the step."""
        return len(self.chunks)

    @property
    def num_chunks(self) -> int:
        """Chunks of the microbatch that has most."""
        return max(self.chunks)

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.stage_to_rank)

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.rows)

    @property
    def virtual_stages(self) -> int:
        """Stages on every rank."""
        return self.num_stages // self.num_ranks

    @cached_property
    def codes(self) -> Codes:
        """The numbering of its actions."""
        return Codes(self.num_stages, self.chunks)

    @cached_property
    def compute_rows(self) -> tuple[tuple[int, ...], ...]:
        """Codes of the compute actions of every rank, in order."""
        return tuple(tuple(code for code in row if code & 7 <= W) for row in self.rows)

    @cached_property
    def compute(self) -> tuple[tuple[Action, ...], ...]:
        """Compute actions of every rank, in order."""
        return tuple(map(self.codes.decode_row, self.compute_rows))

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """All actions of every rank, in order: `compute` with its sends and receives."""
        return tuple(map(self.codes.decode_row, self.rows))

    def actions_of(self, rank: int) -> tuple[Action, ...]:
        """All actions of one rank, in order; cheaper than `actions` where only one is needed."""
        return self.codes.decode_row(self.rows[rank])


def make_plan(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | Sequence[int],
    *,
    virtual_stages: int = 1,
    memory_knob: int | None = None,
    activation_cap: int | None = None,
    times: StepTimes | None = None,
    first_trained_stage: int = 0,
) -> Plan:
    """Order, lower and verify a plan.

    The plan is checked for all ranks, so that every rank refuses a bad one before any communication. The last plans are
    kept, and given again when they are asked for again.

    Args:
        schedule: a name in `policies.POLICIES`.
        num_ranks: ranks of the pipeline.
        num_microbatches: microbatches of the step.
        num_chunks: chunks of every microbatch, or a number for each. Microbatches with most chunks are best put first:
            in any order the last rank holds the units of the longest before its first backward.
        virtual_stages: stages on every rank, placed in a loop: stage s on rank s mod `num_ranks`.
        memory_knob: extra warm-up forwards of a rank for each rank behind it; more take more memory and, with a split
            backward, leave a smaller bubble. None for the schedule's own.
        activation_cap: most units (chunks on one stage) whose activations a rank may hold at once; None for as many as
            the schedule takes.
        times: what units take, by stage and chunk, of all microbatches or of each. They help to choose between orders
            and place the weight gradients of a split backward; the plan is valid for any times.
        first_trained_stage: the first stage with something to train; those before it get no backwards.

    Raises:
        ValueError: for an unknown schedule, a number below 1, a number that the schedule does not support, numbers of
            chunks that are not one for each microbatch, or settings with which the ranks would wait for each other;
            names the nearest that works.
    """
    if schedule not in POLICIES:
        raise ValueError(unknown("schedule", schedule, POLICIES))
    _check_numbers(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks if isinstance(num_chunks, int) else min(num_chunks, default=0),
        virtual_stages=virtual_stages,
        memory_knob=memory_knob,
        activation_cap=activation_cap,
    )
    chunks = (num_chunks,) * num_microbatches if isinstance(num_chunks, int) else tuple(num_chunks)
    if len(chunks) != num_microbatches:
        raise ValueError(
            f"num_chunks={list(chunks)} is of {len(chunks)} microbatches, but num_microbatches is {num_microbatches}; "
            "give one number for each microbatch, or one for all"
        )
    _check_supported(schedule, max(chunks), virtual_stages, memory_knob)
    if not 0 <= first_trained_stage < num_ranks * virtual_stages:
        raise ValueError(
            f"first_trained_stage={first_trained_stage} is none of {num_ranks * virtual_stages} stages, counted from 0"
        )
    return _made(schedule, num_ranks, chunks, virtual_stages, memory_knob, activation_cap, times, first_trained_stage)


@lru_cache(maxsize=16)
def _made(
    schedule: str,
    num_ranks: int,
    chunks: tuple[int, ...],
    virtual_stages: int,
    memory_knob: int | None,
    cap: int | None,
    times: StepTimes | None,
    first_trained_stage: int,
) -> Plan:
    policy, codes = POLICIES[schedule], Codes(num_ranks * virtual_stages, chunks)
    orders = UnitOrders(num_ranks, virtual_stages, codes, policy.splits_backward)
    knob = memory_knob or policy.memory_knob or 1
    try:
        return _plan(schedule, orders, compute_orders(policy, orders, knob, cap, times), first_trained_stage)
    except (StallError, PlanError) as error:
        nearest = _nearest_knob(schedule, orders, knob, cap, times)
        if nearest is None:
            raise
        raise ValueError(
            f"memory_knob={knob} does not work for schedule {schedule!r} with {num_ranks} ranks, "
            f"{codes.chunks_in_words} and {virtual_stages} virtual stages: the ranks would wait for each other for "
            f"ever; the nearest that does is memory_knob={nearest}"
        ) from error


def _plan(schedule: str, orders: UnitOrders, computed: ComputeOrders, first_trained_stage: int = 0) -> Plan:
    # What is left of a valid order when actions are taken out that nothing left waits for is a valid order.
    untrained = first_trained_stage * orders.codes.units_on_a_stage
    rows = [[code for code in row if code >> 3 >= untrained or code & 7 == F] for row in computed.rows]
    plan = Plan(
        schedule=schedule,
        chunks=orders.codes.chunks,
        stage_to_rank=orders.stage_to_rank,
        rows=lower(rows, orders.stage_to_rank, orders.codes, first_trained_stage),
        trains=POLICIES[schedule].trains,
        splits_backward=orders.splits,
        activation_cap=computed.activation_cap,
        first_trained_stage=first_trained_stage,
    )
    verify(plan)
    return plan


def _nearest_knob(schedule: str, orders: UnitOrders, knob: int, cap: int | None, times: StepTimes | None) -> int | None:
    for nearest in range(knob - 1, 0, -1):
        try:
            _plan(schedule, orders, compute_orders(POLICIES[schedule], orders, nearest, cap, times))
        except (StallError, PlanError):
            continue
        return nearest
    return None


def _check_numbers(**numbers: int | None) -> None:
    for knob, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{knob} must be at least 1, not {number}")


def _check_supported(schedule: str, num_chunks: int, virtual_stages: int, memory_knob: int | None) -> None:
    policy = POLICIES[schedule]
    if policy.on_chunks and num_chunks != 1:
        raise ValueError(
            f"schedule {schedule!r} moves whole sequences, but num_chunks is {num_chunks}; set num_chunks=1, or use "
            f"schedule={policy.on_chunks!r}, the same on chunks"
        )
    if not policy.interleaves and virtual_stages != 1:
        raise ValueError(
            f"schedule {schedule!r} has one stage on a rank, but virtual_stages is {virtual_stages}; set "
            f"virtual_stages=1, or use schedule={policy.interleaved!r}"
        )
    if policy.memory_knob is None and memory_knob is not None:
        raise ValueError(
            f"memory_knob has no effect on schedule {schedule!r}, which runs all forwards first; leave it out"
        )
