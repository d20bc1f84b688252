"""A plan: what every rank does in one step, as data, checked for all ranks together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.codes import Codes, W
from lightning_seq1f1b.schedule.compute_orders import ComputeOrders, StallError, compute_orders
from lightning_seq1f1b.schedule.lowering import lower
from lightning_seq1f1b.schedule.plan_error import PlanError
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.suggest import unknown
from lightning_seq1f1b.schedule.unit_orders import UnitOrders
from lightning_seq1f1b.schedule.unit_times import UnitTimes
from lightning_seq1f1b.schedule.verify import verify


@dataclass(frozen=True)
class Plan:
    """The actions of all ranks for one step.

    Attributes:
        schedule: name of the policy that ordered the compute actions.
        num_microbatches: microbatches of the step.
        num_chunks: chunks of every microbatch.
        stage_to_rank: the rank of every stage.
        rows: all actions of every rank, in order, as `codes` numbers them.
        trains: whether it has backwards.
        splits_backward: whether each backward is an I and a W. The W may run elsewhere than where they stand, see
            `activation_cap`; everything else keeps its order.
        activation_cap: most units whose activations a rank may hold, from F to the end of B, or of W; None for no
            limit.
    """

    schedule: str
    num_microbatches: int
    num_chunks: int
    stage_to_rank: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    trains: bool = True
    splits_backward: bool = False
    activation_cap: int | None = None

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
        return Codes(self.num_stages, self.num_microbatches, self.num_chunks)

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


@lru_cache(maxsize=16)
def make_plan(
    schedule: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    virtual_stages: int = 1,
    memory_knob: int | None = None,
    activation_cap: int | None = None,
    times: UnitTimes | None = None,
) -> Plan:
    """Order, lower and verify a plan.

    The plan is checked for all ranks, so that every rank refuses a bad one before any communication.

    Args:
        schedule: a name in `policies.POLICIES`.
        num_ranks: ranks of the pipeline.
        num_microbatches: microbatches of the step.
        num_chunks: chunks of every microbatch.
        virtual_stages: stages on every rank, placed in a loop: stage s on rank s mod `num_ranks`.
        memory_knob: extra warm-up forwards of a rank for each rank behind it; more take more memory and, with a split
            backward, leave a smaller bubble. None for the schedule's own.
        activation_cap: most units (chunks on one stage) whose activations a rank may hold at once; None for as many as
            the schedule takes.
        times: what units take, by stage and chunk. They help to choose between orders and place the weight gradients
            of a split backward; the plan is valid for any times.

    Raises:
        ValueError: for an unknown schedule, a number below 1, a number that the schedule does not support, or settings
            with which the ranks would wait for each other; names the nearest that works.
    """
    if schedule not in POLICIES:
        raise ValueError(unknown("schedule", schedule, POLICIES))
    policy = POLICIES[schedule]
    _check_numbers(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        virtual_stages=virtual_stages,
        memory_knob=memory_knob,
        activation_cap=activation_cap,
    )
    _check_supported(schedule, num_chunks, virtual_stages, memory_knob)
    codes = Codes(num_ranks * virtual_stages, num_microbatches, num_chunks)
    orders = UnitOrders(num_ranks, virtual_stages, codes, policy.splits_backward)
    knob = memory_knob or policy.memory_knob or 1
    try:
        return _plan(schedule, orders, compute_orders(policy, orders, knob, activation_cap, times))
    except (StallError, PlanError) as error:
        nearest = _nearest_knob(schedule, orders, knob, activation_cap, times)
        if nearest is None:
            raise
        raise ValueError(
            f"memory_knob={knob} does not work for schedule {schedule!r} with {num_ranks} ranks, {num_chunks} chunks "
            f"and {virtual_stages} virtual stages: the ranks would wait for each other for ever; the nearest that does "
            f"is memory_knob={nearest}"
        ) from error


def _plan(schedule: str, orders: UnitOrders, computed: ComputeOrders) -> Plan:
    plan = Plan(
        schedule=schedule,
        num_microbatches=orders.codes.num_microbatches,
        num_chunks=orders.codes.num_chunks,
        stage_to_rank=orders.stage_to_rank,
        rows=lower(computed.rows, orders.stage_to_rank, orders.codes),
        trains=POLICIES[schedule].trains,
        splits_backward=orders.splits,
        activation_cap=computed.activation_cap,
    )
    verify(plan)
    return plan


def _nearest_knob(schedule: str, orders: UnitOrders, knob: int, cap: int | None, times: UnitTimes | None) -> int | None:
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
