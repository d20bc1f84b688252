"""Times of units as a step was measured, to simulate with: what is left between the two is waiting and transfers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from lightning_seq1f1b.schedule.actions import Kind
from lightning_seq1f1b.schedule.timeline import Event
from lightning_seq1f1b.schedule.timeline_file import Recording, one_or_each
from lightning_seq1f1b.schedule.unit_times import StepTimes, UnitTimes


def measured_times(
    recording: Recording, num_stages: int, num_chunks: int | tuple[int, ...], *, splits_backward: bool
) -> StepTimes:
    """The times for a plan, by stage and chunk; 0 for what was not run.

    Where all microbatches have as many chunks, they are the medians over the microbatches; else those of each.

    Args:
        recording: the measured step.
        num_stages: stages of the plan.
        num_chunks: chunks of every microbatch of the plan, or of each.
        splits_backward: whether the plan splits its backwards. If not, the times of backwards that were measured whole
            stand in `input_grad`, and those of `weight_grad` are 0.

    Raises:
        ValueError: if the step had other stages or chunks, or did not split its backwards although the plan does.
    """
    chunks = one_or_each(recording.chunks)
    if (num_stages, num_chunks) != (recording.num_stages, chunks):
        raise ValueError(
            f"the measured times are those of {recording.num_stages} stages and {chunks} chunks, "
            f"not of {num_stages} and {num_chunks}"
        )
    if splits_backward and any(event.action.kind is Kind.B for event in recording.events):
        raise ValueError("the measured backwards were not split, so nothing is known about the times of their halves")
    if isinstance(chunks, int):
        return _medians(recording.events, num_stages, chunks)
    of_each: list[list[Event]] = [[] for _ in chunks]
    for event in recording.events:
        of_each[event.action.unit.microbatch].append(event)
    return tuple(_medians(events, num_stages, count) for events, count in zip(of_each, chunks, strict=True))


def _medians(events: Iterable[Event], num_stages: int, num_chunks: int) -> UnitTimes:
    taken: defaultdict[tuple[Kind, int, int], list[float]] = defaultdict(list)
    for event in events:
        kind, stage, unit = event.action
        taken[Kind.I if kind is Kind.B else kind, stage, unit.chunk].append(float(event.end - event.start))

    def table(kind: Kind) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(median(taken.get((kind, stage, chunk), [0])) for chunk in range(num_chunks))
            for stage in range(num_stages)
        )

    return UnitTimes(forward=table(Kind.F), input_grad=table(Kind.I), weight_grad=table(Kind.W))
