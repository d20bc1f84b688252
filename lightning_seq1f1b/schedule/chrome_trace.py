"""Timelines as trace events in JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_seq1f1b.schedule.memory_curve import UnitSizes, memory_over_time
from lightning_seq1f1b.schedule.timeline import Time
from lightning_seq1f1b.schedule.timeline_file import Recording

_MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0, "µs": 1.0, "ns": 1e-3}
_MICROSECONDS_OF_NO_UNIT = 1e6


def chrome_trace(recordings: Mapping[str, Recording], sizes: UnitSizes | None = None) -> dict[str, Any]:
    """Timelines in the trace event format: a process for each, a thread for each rank, a counter of each rank's memory.

    Timestamps are microseconds from the start of each timeline; where its times have no unit, one of them is shown as
    one second.

    Args:
        recordings: timelines by the name that the trace shows.
        sizes: what the units take, for the counters, in bytes; None counts units.

    Returns:
        What goes into the file, as JSON.
    """
    events: list[dict[str, Any]] = []
    for process, (name, recording) in enumerate(recordings.items()):
        title = f"{name}: {recording.schedule}" if recording.schedule else name
        events.append(_metadata("process_name", process, 0, name=title))
        events.append(_metadata("process_sort_index", process, 0, sort_index=process))
        for rank in range(recording.num_ranks):
            events.append(_metadata("thread_name", process, rank, name=f"rank {rank}"))
            events.append(_metadata("thread_sort_index", process, rank, sort_index=rank))
        events += _slices(recording, process)
        events += _counters(recording, process, sizes)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(kind: str, process: int, thread: int, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _slices(recording: Recording, process: int) -> list[dict[str, Any]]:
    first, scale = _clock(recording)
    slices = []
    for event in recording.events:
        kind, stage, unit = event.action
        slices.append(
            {
                "ph": "X",
                "name": f"{kind.value} {unit}",
                "cat": kind.value,
                "pid": process,
                "tid": event.rank,
                "ts": float(event.start - first) * scale,
                "dur": float(event.end - event.start) * scale,
                "args": {
                    "action": str(event.action),
                    "stage": stage,
                    "microbatch": unit.microbatch,
                    "chunk": unit.chunk,
                },
            }
        )
    return slices


def _counters(recording: Recording, process: int, sizes: UnitSizes | None) -> list[dict[str, Any]]:
    first, scale = _clock(recording)
    unit = "units" if sizes is None else "bytes"
    sizes = sizes or UnitSizes.one_each(recording.num_stages, recording.num_chunks)
    counters = []
    for rank, curve in enumerate(memory_over_time(recording.events, recording.num_ranks, sizes)):
        # Of several changes at one time a counter shows the last.
        for time, held in {0.0: 0.0, **{float(time - first) * scale: held for time, held in curve}}.items():
            counters.append(
                {
                    "ph": "C",
                    "name": f"rank {rank} holds",
                    "pid": process,
                    "tid": rank,
                    "ts": time,
                    "args": {unit: held},
                }
            )
    return counters


def _clock(recording: Recording) -> tuple[Time, float]:
    """When the timeline starts, and the microseconds of one of its unit of time."""
    return (
        min(event.start for event in recording.events),
        _MICROSECONDS.get(recording.time_unit or "", _MICROSECONDS_OF_NO_UNIT),
    )
