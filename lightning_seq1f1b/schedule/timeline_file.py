"""Timelines as files: one JSON format for simulated and measured ones, so that they can be kept, compared and drawn."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from os import PathLike
from typing import Any

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.memory_curve import UnitSizes, chunks_of, memory_over_time
from lightning_seq1f1b.schedule.timeline import Event

_SETTINGS = ("memory_knob", "activation_cap")
"""Settings of the plan that a file may hold; one of an earlier version holds none."""


@dataclass(frozen=True)
class Recording:
    """A timeline with what it is of.

    Attributes:
        events: the compute actions, all ranks together; those of one rank in the order in which they ran.
        schedule: name of the schedule; None if unknown.
        time_unit: the unit of the times, such as "s"; None if they are in no particular unit.
        memory_knob: that of its plan, see `plan.make_plan`; None for the schedule's own, or if unknown.
        activation_cap: that of its plan; None for no limit, or if unknown.
    """

    events: tuple[Event, ...]
    schedule: str | None = None
    time_unit: str | None = None
    memory_knob: int | None = None
    activation_cap: int | None = None

    @cached_property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return 1 + max(event.rank for event in self.events)

    @cached_property
    def num_stages(self) -> int:
        """Stages on all ranks together."""
        return 1 + max(event.action.stage for event in self.events)

    @cached_property
    def virtual_stages(self) -> int:
        """Stages on each rank."""
        return self.num_stages // self.num_ranks

    @cached_property
    def num_microbatches(self) -> int:
        """Microbatches of the step."""
        return len(self.chunks)

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Chunks of each microbatch."""
        return chunks_of(event.action for event in self.events)

    @property
    def num_chunks(self) -> int:
        """Chunks of the microbatch that has most."""
        return max(self.chunks)

    @cached_property
    def peak_units(self) -> tuple[int, ...]:
        """The most units whose activations every rank held at once."""
        sizes = UnitSizes.one_each(self.num_stages, self.num_chunks)
        curves = memory_over_time(self.events, self.num_ranks, sizes)
        return tuple(int(max((held for _, held in curve), default=0)) for curve in curves)


def save(
    path: str | PathLike[str],
    events: Iterable[Event],
    *,
    schedule: str | None = None,
    time_unit: str | None = "s",
    memory_knob: int | None = None,
    activation_cap: int | None = None,
) -> None:
    """Write a timeline to a file that `load` and `lightning-seq1f1b schedule draw --measured` read.

    A measured one, called on every rank and written by one of them:

        events = strategy.gather_trace()
        if trainer.global_rank == 0:
            plan = strategy.last_step.plan
            save("step.json", events, schedule=plan.schedule, activation_cap=plan.activation_cap)

    Args:
        path: the file.
        events: the compute actions of all ranks; others are left out.
        schedule: name of the schedule, which the drawing command then need not be told.
        time_unit: the unit of the times.
        memory_knob: that of the plan; the command then simulates with it.
        activation_cap: that of the plan, likewise.

    Raises:
        ValueError: if there is no compute action, or path and events are swapped.
    """
    if not isinstance(path, (str, PathLike)):
        raise ValueError(f"the path comes first and the events second: save(path, events), not a {type(path).__name__}")
    computed = tuple(event for event in events if event.action.computes)
    recording = Recording(computed, schedule, time_unit, memory_knob, activation_cap)
    if not recording.events:
        raise ValueError("there is nothing to save: the timeline has no compute action")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(to_json(recording), file)
        file.write("\n")


def to_json(recording: Recording) -> dict[str, Any]:
    """The content of a file: what the timeline is of, and `timeline`, an object for each event.

        {"schedule": "seq1f1b", "stages": 1, "virtual_stages": 1, "microbatches": 1, "chunks": 1, "memory_knob": null,
         "activation_cap": null, "time_unit": "s",
         "timeline": [{"rank": 0, "action": "0F0.0", "start": 0.0, "end": 1.0}, ...]}

    `stages` counts pipeline ranks, like the command's option `--stages`; `chunks` lists those of each microbatch where
    they differ. An action is <stage><kind><microbatch>.<chunk>
    with the kinds F, B, or I and W for the halves of a backward.
    """
    return {
        "schedule": recording.schedule,
        "stages": recording.num_ranks,
        "virtual_stages": recording.virtual_stages,
        "microbatches": recording.num_microbatches,
        "chunks": one_or_each(recording.chunks),
        "memory_knob": recording.memory_knob,
        "activation_cap": recording.activation_cap,
        "time_unit": recording.time_unit,
        "timeline": rows(recording.events),
    }


def one_or_each(chunks: tuple[int, ...]) -> int | tuple[int, ...]:
    """The chunks of every microbatch, as `make_plan` takes them: one number where they are alike."""
    return chunks[0] if len(set(chunks)) == 1 else chunks


def rows(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The events as a file holds them; times become floats."""
    return [
        {"rank": event.rank, "action": str(event.action), "start": float(event.start), "end": float(event.end)}
        for event in events
    ]


def load(path: str | PathLike[str]) -> Recording:
    """Read a file that `save` wrote, or the output of `lightning-seq1f1b schedule draw --json`.

    Raises:
        ValueError: if the file cannot be read, or holds no timeline.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise ValueError(f"the timeline {str(path)!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no timeline: it is not JSON ({error})") from error
    listed = content.get("timeline") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise ValueError(f"{str(path)!r} is no timeline: it has no list 'timeline' of events")
    try:
        events = tuple(map(_event, listed))
    except (KeyError, TypeError, ValueError) as error:
        expected = '{"rank": 0, "action": "0F0.0", "start": 0.0, "end": 1.0}'
        raise ValueError(f"{str(path)!r} is no timeline: an event is not like {expected}: {error!r}") from error
    if not events:
        raise ValueError(f"the timeline {str(path)!r} is empty")
    for name in _SETTINGS:
        number = content.get(name)
        if number is not None and (type(number) is not int or number < 1):
            raise ValueError(f"{str(path)!r} is no timeline: {name} must be null or at least 1, not {number!r}")
    settings = {name: content.get(name) for name in _SETTINGS}
    return Recording(events, content.get("schedule"), content.get("time_unit"), **settings)


def _event(row: dict[str, Any]) -> Event:
    event = Event(int(row["rank"]), Action.parse(row["action"]), float(row["start"]), float(row["end"]))
    if not (
        event.rank >= 0 and event.action.computes and isfinite(event.end) and -float("inf") < event.start <= event.end
    ):
        raise ValueError(f"{row} is no compute action of a rank that ends after it starts")
    return event
