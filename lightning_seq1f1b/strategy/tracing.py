"""The times of a step of all pipeline ranks, on one clock."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist

from lightning_seq1f1b.runtime.clocks import machine
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.schedule.timeline import Event

T = TypeVar("T")


def gather_objects(item: T, group: dist.ProcessGroup) -> list[T]:
    """An object that pickles, of every process of a group on the CPU; called on all of them."""
    everyone = [item] * dist.get_world_size(group)
    dist.all_gather_object(everyone, item, group=group)
    return everyone


def gather_events(trace: StepTrace, group: dist.ProcessGroup) -> list[Event]:
    """The compute actions of all pipeline ranks in one step.

    Args:
        trace: this rank's.
        group: the pipeline's control group; called on all of its processes.

    Returns:
        One event for each action, by rank, in seconds. On one machine all ranks read the same clock. On several, each
        rank's times count from its begin of the step, which is the same moment but for the time of a message.
    """
    everyone = gather_objects((machine(), trace.began or 0.0, trace.events), group)
    if len({where for where, _, _ in everyone}) == 1:
        return [event for _, _, events in everyone for event in events]
    return [
        replace(event, start=event.start - began, end=event.end - began)
        for _, began, events in everyone
        for event in events
    ]
