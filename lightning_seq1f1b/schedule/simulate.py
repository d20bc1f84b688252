"""Plays a plan with given times for its actions: makespan, bubble, peak of units in memory, and the timeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

from lightning_seq1f1b.schedule.actions import Action, Kind, Unit
from lightning_seq1f1b.schedule.codes import B, Codes, F, W
from lightning_seq1f1b.schedule.plan import Plan
from lightning_seq1f1b.schedule.plan_error import PlanError
from lightning_seq1f1b.schedule.play import Durations, Play, expand, play
from lightning_seq1f1b.schedule.timeline import Event, Time
from lightning_seq1f1b.schedule.unit_times import StepTimes, UnitTimes


@dataclass(frozen=True)
class Costs:
    """Times of compute actions when all stages and all microbatches are alike.

    Attributes:
        forward: time of the forward of one whole microbatch on one rank's layers.
        input_grad: time of the part of its backward that gives the gradient of the input.
        weight_grad: time of the part of its backward that gives the gradients of the weights.
        num_chunks: chunks that share those times.
        chunk_weights: how the chunks share them, one positive number for each; None for equal shares.
        virtual_stages: stages of a rank that share them equally.
    """

    forward: Time
    input_grad: Time
    weight_grad: Time
    num_chunks: int
    chunk_weights: tuple[Time, ...] | None = None
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        """Refuse times that are negative or infinite, and weights that do not fit.

        Raises:
            ValueError: for both.
        """
        for knob in ("forward", "input_grad", "weight_grad"):
            time = getattr(self, knob)
            if not (isfinite(time) and time >= 0):
                raise ValueError(f"{knob} is a time and must be finite and not negative; it is {time}")
        weights = self.chunk_weights
        if weights is not None and (len(weights) != self.num_chunks or min(weights) <= 0):
            raise ValueError(f"chunk_weights must be {self.num_chunks} positive numbers, not {weights}")

    def __call__(self, action: Action) -> Time:
        """The time of a compute action; a B gives both gradients, I and W one each."""
        whole = {
            Kind.F: self.forward,
            Kind.B: self.input_grad + self.weight_grad,
            Kind.I: self.input_grad,
            Kind.W: self.weight_grad,
        }[action.kind]
        if self.chunk_weights is None:
            return whole / (self.num_chunks * self.virtual_stages)
        return whole * self.chunk_weights[action.unit.chunk] / (sum(self.chunk_weights) * self.virtual_stages)

    def unit_times(self, num_stages: int) -> UnitTimes:
        """The same times, by stage and chunk."""

        def alike(kind: Kind) -> tuple[tuple[Time, ...], ...]:
            return (tuple(self(Action(kind, 0, Unit(0, chunk))) for chunk in range(self.num_chunks)),) * num_stages

        return UnitTimes(alike(Kind.F), alike(Kind.I), alike(Kind.W))


@dataclass(frozen=True)
class Simulation:
    """How a step would go. Times are in the unit of the costs.

    Attributes:
        makespan: length of the step.
        bubble: the makespan minus a rank's work, the largest over ranks.
        work: computing time of every rank.
        peak_units: the most units whose activations a rank holds at once, for every rank.
    """

    makespan: Time
    bubble: Time
    work: tuple[Time, ...]
    peak_units: tuple[int, ...]
    _play: Play
    _codes: Codes

    @cached_property
    def timeline(self) -> tuple[Event, ...]:
        """Every compute action, in an order in which the ranks could run them one at a time."""
        decode = self._codes.decode
        return tuple(Event(rank, decode(code), start, end) for rank, code, start, end in self._play.actions)

    @property
    def rows(self) -> list[list[int]]:
        """Codes of the compute actions of every rank, in the order in which they have run."""
        rows: list[list[int]] = [[] for _ in self.work]
        for rank, code, _, _ in self._play.actions:
            rows[rank].append(code)
        return rows


def simulate(
    plan: Plan, costs: Callable[[Action], Time] | StepTimes, latency: Time = 0, *, early_weight_grads: bool = False
) -> Simulation:
    """Play a plan, in time linear in its actions; exact when the times are fractions.

    Every rank runs its compute actions in the plan's order. Sends and receives take no time of the rank: the data is
    there `latency` after its producer's end, and the compute action that needs it waits.

    A unit is held from the start of its forward to the end of its backward (of W where it is split, of the forward
    where the stage has no backwards).

    Args:
        plan: what to play.
        costs: the time of a compute action, such as a `UnitTimes` or `Costs`; or a `UnitTimes` of each microbatch.
        latency: how long a transfer takes.
        early_weight_grads: whether a rank that would wait runs the oldest W that is due instead, as the executor does;
            else every W runs in its place, which is where the times that the plan was made for want it.

    Raises:
        PlanError: if the plan stalls, which a verified plan never does.
    """
    rows = plan.compute_rows
    times = durations(plan, costs)
    played = play(rows, plan.stage_to_rank, plan.codes, times, latency, early=early_weight_grads)
    if played.waiting:
        rank, code = min(played.waiting.items())
        reason = f"the plan stalls: rank {rank} waits for {plan.codes.decode(code)}"
        raise PlanError(reason, plan.rows, plan.codes, rank, len(plan.rows[rank]))
    work: list[Time] = [0] * len(rows)
    for rank, _, start, end in played.actions:
        work[rank] += end - start
    makespan = max((end for *_, end in played.actions), default=0)
    return Simulation(
        makespan=makespan,
        bubble=makespan - min(work),
        work=tuple(work),
        peak_units=tuple(played.peaks) if plan.trains_stage(0) else _peaks(plan, played),
        _play=played,
        _codes=plan.codes,
    )


def _peaks(plan: Plan, played: Play) -> tuple[int, ...]:
    """The most units that every rank holds at once, where some stages let go of them after the forward."""
    last, units = (W if plan.splits_backward else B), plan.codes.units_on_a_stage
    held, peaks = [0] * plan.num_ranks, [0] * plan.num_ranks
    for rank, code, _, _ in played.actions:
        kind = code & 7
        if kind == F:
            peaks[rank] = max(peaks[rank], held[rank] + 1)
            held[rank] += plan.trains_stage((code >> 3) // units)
        elif kind == last:
            held[rank] -= 1
    return tuple(peaks)


def durations(plan: Plan, costs: Callable[[Action], Time] | StepTimes) -> Durations:
    """The times of all compute actions of a plan; fast for tables and `Costs`."""
    if isinstance(costs, Costs):
        costs = costs.unit_times(plan.num_stages)
    if isinstance(costs, (UnitTimes, tuple)):
        return expand(costs, plan.codes)
    by_kind: list[list[Time]] = [[0] * plan.codes.num_indices for _ in range(4)]
    for code in (code for row in plan.compute_rows for code in row):
        by_kind[code & 7][code >> 3] = costs(plan.codes.decode(code))
    return Durations(*by_kind)
