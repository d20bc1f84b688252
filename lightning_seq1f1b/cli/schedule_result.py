"""What `lightning-seq1f1b schedule` found out, as text and as JSON."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.draw import draw_together, legend
from lightning_seq1f1b.schedule.plan import Plan
from lightning_seq1f1b.schedule.simulate import Simulation
from lightning_seq1f1b.schedule.timeline import Event, Time, bubble, makespan
from lightning_seq1f1b.schedule.timeline_file import Recording, one_or_each, rows

_WIDTH_OF_A_PIPE = 160
_MOST_RANKS_LISTED = 16


@dataclass(frozen=True)
class Result:
    """A verified plan, and how its step would go.

    Attributes:
        plan: the plan.
        memory_knob: extra warm-up forwards of a rank for each rank behind it; None where there is no such knob.
        times: forward, input gradient and weight gradient of one microbatch on one rank's layers; None where the times
            of a measured step were taken.
        links: latency of a transfer.
        simulation: the step, simulated, in ticks.
        ticks: how many ticks are one unit of time.
        measured: a measured step to show with it.
    """

    plan: Plan
    memory_knob: int | None
    times: tuple[Time, Time, Time] | None
    links: Time
    simulation: Simulation
    ticks: int
    measured: Recording | None = None

    @property
    def makespan(self) -> float:
        """Length of the simulated step."""
        return float(self.simulation.makespan / self.ticks)

    @property
    def bubble(self) -> float:
        """Bubble of the simulated step."""
        return float(self.simulation.bubble / self.ticks)

    @property
    def work(self) -> list[float]:
        """Computing time of every rank."""
        return [float(work / self.ticks) for work in self.simulation.work]

    @cached_property
    def simulated(self) -> Recording:
        """The simulated step, as files and pictures take it."""
        events = (
            Event(event.rank, event.action, event.start / self.ticks, event.end / self.ticks)
            for event in self.simulation.timeline
        )
        unit = self.measured.time_unit if self.measured else None
        return Recording(tuple(events), self.plan.schedule, unit, self.memory_knob, self.plan.activation_cap)

    @cached_property
    def warnings(self) -> list[str]:
        """What makes the measured step another one than the simulated one, or than its plan allows."""
        if self.measured is None:
            return []
        found = []
        cap, peaks = self.measured.activation_cap, self.measured.peak_units
        if cap is not None and max(peaks) > cap:
            found.append(f"a rank of the measured step held {max(peaks)} units; the cap of its plan is {cap}")
        if _described(self.measured) == _described(self.simulated) and _order(self.measured) != _order(self.simulated):
            found.append(
                "the measured step ran in another order than the simulated one; its plan had another --memory-knob or "
                "--activation-cap, or was made for other times"
            )
        return found

    @property
    def recordings(self) -> dict[str, Recording]:
        """What to draw, by name, from top to bottom."""
        shown = {"measured": self.measured} if self.measured else {}
        return {**shown, "simulated": self.simulated}


def _described(recording: Recording) -> tuple[object, ...]:
    return recording.schedule, recording.num_ranks, recording.num_stages, recording.chunks


def _order(recording: Recording) -> dict[int, list[Action]]:
    """The forwards and backwards of every rank, without W, which may run whenever there is time."""
    order: dict[int, list[Action]] = {}
    for event in sorted(recording.events, key=lambda event: event.start):
        if event.action.kind is not Kind.W:
            order.setdefault(event.rank, []).append(event.action)
    return order


def numbers(result: Result) -> dict[str, Any]:
    """`simulate --json`."""
    plan = result.plan
    forward, input_grad, weight_grad = map(float, result.times) if result.times else (None, None, None)
    return {
        "schedule": plan.schedule,
        "stages": plan.num_ranks,
        "microbatches": plan.num_microbatches,
        "chunks": one_or_each(plan.chunks),
        "virtual_stages": plan.virtual_stages,
        "memory_knob": result.memory_knob,
        "activation_cap": plan.activation_cap,
        "splits_backward": plan.splits_backward,
        "forward": forward,
        "input_grad": input_grad,
        "weight_grad": weight_grad,
        "links": float(result.links),
        "valid": True,
        "makespan": result.makespan,
        "bubble": result.bubble,
        "work": result.work,
        "peak_units": list(result.simulation.peak_units),
    }


def drawn_numbers(result: Result) -> dict[str, Any]:
    """`draw --json`, which is a timeline file too."""
    shown = {**numbers(result), "time_unit": result.simulated.time_unit, "timeline": rows(result.simulated.events)}
    if result.measured:
        events = result.measured.events
        shown["measured"] = {
            "schedule": result.measured.schedule,
            "memory_knob": result.measured.memory_knob,
            "activation_cap": result.measured.activation_cap,
            "peak_units": list(result.measured.peak_units),
            "warnings": result.warnings,
            "makespan": float(makespan(events)),
            "bubble": float(bubble(events)),
            "timeline": rows(events),
        }
    return shown


def verified_numbers(result: Result) -> dict[str, Any]:
    """`verify --json`."""
    return {**numbers(result), "actions": [len(row) for row in result.plan.actions]}


def drawn(result: Result) -> str:
    """`draw`."""
    width = shutil.get_terminal_size((_WIDTH_OF_A_PIPE, 24)).columns
    recordings = result.recordings
    num_ranks = max(recording.num_ranks for recording in recordings.values())
    shown = {name if len(recordings) > 1 else "": recording.events for name, recording in recordings.items()}
    picture = draw_together(shown, num_ranks, width)
    signs = legend([event for events in shown.values() for event in events], num_ranks)
    return f"{title(result.plan)}\n\n{picture}\n\n{signs}\n\n{summary(result)}"


def simulated(result: Result) -> str:
    """`simulate`."""
    work = _each([f"{work:g}" for work in result.work])
    return f"{title(result.plan)}\n{summary(result)}\nwork        {work}"


def verified(result: Result) -> str:
    """`verify`."""
    actions = sum(map(len, result.plan.actions))
    return f"{title(result.plan)}: valid, {actions} actions on {len(result.plan.actions)} ranks"


def title(plan: Plan) -> str:
    """The plan in a line."""
    chunks = one_or_each(plan.chunks)
    cut = _count(chunks, "chunk", "chunks") if isinstance(chunks, int) else f"{', '.join(map(str, chunks))} chunks"
    parts = [_count(plan.num_microbatches, "microbatch", "microbatches"), cut]
    if plan.virtual_stages == 1:
        placed = _count(plan.num_ranks, "stage", "stages")
    else:
        placed = f"{_count(plan.num_ranks, 'rank', 'ranks')} of {plan.virtual_stages} stages"
    return f"{plan.schedule}: {', '.join([placed, *parts])}"


def summary(result: Result) -> str:
    """The numbers of the simulated step, beside those of the measured one."""
    lines = [
        f"makespan    {result.makespan:g}",
        f"bubble      {_share(result.bubble, result.makespan)}",
        f"peak units  {_peaks(result.simulation.peak_units)}",
    ]
    if result.measured:
        lines[2:] = [
            f"peak units  {_peaks(result.measured.peak_units)} measured,",
            f"            {_peaks(result.simulation.peak_units)} simulated",
        ]
        events = result.measured.events
        unit = f" {result.measured.time_unit}" if result.measured.time_unit else ""
        lines[:2] = [
            f"makespan    {float(makespan(events)):g}{unit} measured, {result.makespan:g}{unit} simulated",
            f"bubble      {_share(bubble(events), makespan(events))} measured, "
            f"{_share(result.bubble, result.makespan)} simulated",
        ]
    if result.plan.activation_cap is not None:
        lines.append(f"cap         {result.plan.activation_cap} units on a rank")
    return "\n".join([*lines, *(f"warning     {warning}" for warning in result.warnings)])


def _peaks(peaks: Sequence[int]) -> str:
    each = _each(list(map(str, peaks)))
    return each if len(set(peaks)) == 1 else f"{each} (rank 0 first{_highest(peaks)})"


def _highest(peaks: Sequence[int]) -> str:
    return f", at most {max(peaks)}" if len(peaks) > _MOST_RANKS_LISTED else ""


def _each(numbers: Sequence[str]) -> str:
    """A number of every rank: once if all are equal, and without the ranks in the middle if there are many."""
    if len(numbers) > 1 and len(set(numbers)) == 1:
        return f"{numbers[0]} on each rank"
    if len(numbers) > _MOST_RANKS_LISTED:
        ends = _MOST_RANKS_LISTED // 4
        return " ".join([*numbers[:ends], "...", *numbers[-ends:]])
    return " ".join(numbers)


def _share(part: Time, whole: Time) -> str:
    return f"{float(part):g} ({float(part / whole) if whole else 0.0:.1%} of the makespan)"


def _count(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
