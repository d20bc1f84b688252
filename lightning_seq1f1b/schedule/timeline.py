"""When every action ran, simulated or measured, and what can be read from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from lightning_seq1f1b.schedule.actions import Action

Time: TypeAlias = Fraction | float
"""A point in time or a duration, in any unit, as long as it is the same everywhere; fractions keep it exact."""


@dataclass(frozen=True)
class Event:
    """One action of one rank, from `start` to `end`."""

    rank: int
    action: Action
    start: Time
    end: Time


def busy_time(timeline: Iterable[Event]) -> dict[int, Time]:
    """How long each rank computes, by rank; waiting and transferring do not count."""
    busy: dict[int, Time] = {}
    for event in timeline:
        spent = event.end - event.start if event.action.computes else 0
        busy[event.rank] = busy.get(event.rank, 0) + spent
    return busy


def makespan(timeline: Iterable[Event]) -> Time:
    """From the first start to the last end, over all ranks; 0 when nothing happened."""
    events = list(timeline)
    if not events:
        return 0
    return max(event.end for event in events) - min(event.start for event in events)


def bubble(timeline: Iterable[Event]) -> Time:
    """The makespan minus a rank's busy time, the largest over ranks."""
    events = list(timeline)
    return makespan(events) - min(busy_time(events).values(), default=0)
