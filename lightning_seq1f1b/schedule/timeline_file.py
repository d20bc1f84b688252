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
from lightning_seq1f1b.schedule.timeline import Event


@dataclass(frozen=True)
class Recording:
    """A timeline with what it is of.

    Attributes:
        events: the compute actions, all ranks together; those of one rank in the order in which they ran.
        schedule: name of the schedule; None if unknown.
        time_unit: the unit of the times, such as "s"; None if they are in no particular unit.
    """

    events: tuple[Event, ...]
    schedule: str | None = None
    time_unit: str | None = None

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
        return 1 + max(event.action.unit.microbatch for event in self.events)

    @cached_property
    def num_chunks(self) -> int:
        """Chunks of every microbatch."""
        return 1 + max(event.action.unit.chunk for event in self.events)


def save(
    path: str | PathLike[str], events: Iterable[Event], *, schedule: str | None = None, time_unit: str | None = "s"
) -> None:
    """Write a timeline to a file that `load` and `lightning-seq1f1b schedule draw --measured` read.

    A measured one, called on every rank and written by one of them:

        events = strategy.gather_trace()
        if trainer.global_rank == 0:
            save("step.json", events, schedule=strategy.last_step.plan.schedule)

    Args:
        path: the file.
        events: the compute actions of all ranks; others are left out.
        schedule: name of the schedule, which the drawing command then need not be told.
        time_unit: the unit of the times.

    Raises:
        ValueError: if there is no compute action.
    """
    recording = Recording(tuple(event for event in events if event.action.computes), schedule, time_unit)
    if not recording.events:
        raise ValueError("there is nothing to save: the timeline has no compute action")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(to_json(recording), file)
        file.write("\n")


def to_json(recording: Recording) -> dict[str, Any]:
    """The content of a file: what the timeline is of, and `timeline`, an object for each event.

        {"schedule": "seq1f1b", "stages": 1, "virtual_stages": 1, "microbatches": 1, "chunks": 1, "time_unit": "s",
         "timeline": [{"rank": 0, "action": "0F0.0", "start": 0.0, "end": 1.0}, ...]}

    `stages` counts pipeline ranks, like the command's option `--stages`. An action is <stage><kind><microbatch>.<chunk>
    with the kinds F, B, or I and W for the halves of a backward.
    """
    return {
        "schedule": recording.schedule,
        "stages": recording.num_ranks,
        "virtual_stages": recording.virtual_stages,
        "microbatches": recording.num_microbatches,
        "chunks": recording.num_chunks,
        "time_unit": recording.time_unit,
        "timeline": rows(recording.events),
    }


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
        recording = Recording(tuple(map(_event, listed)), content.get("schedule"), content.get("time_unit"))
    except (KeyError, TypeError, ValueError) as error:
        expected = '{"rank": 0, "action": "0F0.0", "start": 0.0, "end": 1.0}'
        raise ValueError(f"{str(path)!r} is no timeline: an event is not like {expected}: {error!r}") from error
    if not recording.events:
        raise ValueError(f"the timeline {str(path)!r} is empty")
    return recording


def _event(row: dict[str, Any]) -> Event:
    event = Event(int(row["rank"]), Action.parse(row["action"]), float(row["start"]), float(row["end"]))
    if not (
        event.rank >= 0 and event.action.computes and isfinite(event.end) and -float("inf") < event.start <= event.end
    ):
        raise ValueError(f"{row} is no compute action of a rank that ends after it starts")
    return event
