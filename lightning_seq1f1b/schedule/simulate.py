"""Plays a plan with given times for its actions: makespan, bubble, peak of units in memory, and the timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.global_order import global_order
from lightning_seq1f1b.schedule.plan import Plan
from lightning_seq1f1b.schedule.requirements import requirements
from lightning_seq1f1b.schedule.timeline import Event, Time, bubble, busy_time, makespan


@dataclass(frozen=True)
class Costs:
    """Times of compute actions when all stages and all microbatches are alike.

    Attributes:
        forward: time of the forward of one whole microbatch on one rank's layers.
        input_grad: time of the part of its backward that gives the gradient of the input.
        weight_grad: time of the part of its backward that gives the gradients of the weights.
        num_chunks: chunks that share those times.
        chunk_weights: how the chunks share them, one positive number for each; None for equal shares.
    """

    forward: Time
    input_grad: Time
    weight_grad: Time
    num_chunks: int
    chunk_weights: tuple[Time, ...] | None = None

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
        """The time of a forward, or of a backward that gives both gradients."""
        whole = {Kind.F: self.forward, Kind.B: self.input_grad + self.weight_grad}[action.kind]
        if self.chunk_weights is None:
            return whole / self.num_chunks
        return whole * self.chunk_weights[action.unit.chunk] / sum(self.chunk_weights)


@dataclass(frozen=True)
class Simulation:
    """How a step would go. Times are in the unit of the costs.

    Attributes:
        makespan: length of the step.
        bubble: the makespan minus a rank's work, the largest over ranks.
        work: computing time of every rank.
        peak_units: the most units whose activations a rank holds at once, for every rank.
        timeline: every compute action, in an order in which the ranks could run them one at a time.
    """

    makespan: Time
    bubble: Time
    work: tuple[Time, ...]
    peak_units: tuple[int, ...]
    timeline: tuple[Event, ...]


def simulate(plan: Plan, costs: Callable[[Action], Time], latency: Time = 0) -> Simulation:
    """Play a plan, in time linear in its actions; exact when the times are fractions.

    Every rank runs its actions in order. Sends and receives take no time of the rank: the data is there `latency` after
    both ends are posted, and the compute action that needs it waits.

    Args:
        plan: what to play.
        costs: the time of a compute action, such as a `Costs`.
        latency: how long a transfer takes.

    Raises:
        PlanError: if the plan stalls, which a verified plan never does.
    """
    waits_for = requirements(plan.stage_to_rank, plan.num_microbatches, plan.num_chunks, trains=plan.trains).waits_for
    clock: list[Time] = [0] * len(plan.actions)
    end: dict[Action, Time] = {}
    timeline = []
    for rank, action in global_order(plan.actions, waits_for):
        if action.computes:
            arrivals = (end[needed] + (0 if needed.computes else latency) for needed in waits_for[action])
            start = max(clock[rank], *arrivals, 0)
            clock[rank] = start + costs(action)
            timeline.append(Event(rank, action, start, clock[rank]))
        end[action] = clock[rank]
    busy = busy_time(timeline)
    return Simulation(
        makespan=makespan(timeline),
        bubble=bubble(timeline),
        work=tuple(busy[rank] for rank in range(len(clock))),
        peak_units=tuple(peak_units(row, trains=plan.trains) for row in plan.compute),
        timeline=tuple(timeline),
    )


def peak_units(compute: Sequence[Action], *, trains: bool) -> int:
    """The most units whose activations one rank holds at once.

    A unit is held from the start of its forward to the end of its backward, or of its forward if the plan has no
    backwards.
    """
    if not trains:
        return 1
    held = peak = 0
    for action in compute:
        held += 1 if action.kind is Kind.F else -1
        peak = max(peak, held)
    return peak
