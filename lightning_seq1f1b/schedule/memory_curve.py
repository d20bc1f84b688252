"""What every rank holds in memory over a step, from the sizes of its units: as a curve over time, or only its peak."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.codes import KINDS
from lightning_seq1f1b.schedule.plan import Plan
from lightning_seq1f1b.schedule.timeline import Event, Time

Sizes = tuple[tuple[float, ...], ...]
"""A number for every stage and chunk: `sizes[stage][chunk]`."""


@dataclass(frozen=True)
class UnitSizes:
    """What one unit, a chunk of one microbatch, takes on every stage, in bytes or any other unit.

    Every table has a row for each stage and a number for each chunk in it.

    Attributes:
        activations: held from the start of the forward to the end of the backward, or of its first half I.
        deferred: held from the end of I to the end of W, in place of the activations: the inputs and the output
            gradients of the linear layers. A backward that is not split has none of it.
        keys_values: written by the forward of the chunk, and freed together with those of the microbatch's other
            chunks on the stage when the backward (or I) of chunk 0, the last to read them, ends.
    """

    activations: Sizes
    deferred: Sizes
    keys_values: Sizes

    def __post_init__(self) -> None:
        """Refuse tables of different shapes.

        Raises:
            ValueError: for those.
        """
        shapes = {
            name: [len(row) for row in getattr(self, name)] for name in ("activations", "deferred", "keys_values")
        }
        if any(shape != shapes["activations"] for shape in shapes.values()):
            numbers = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise ValueError(
                f"the tables need one row for every stage, and as many chunks in each; they have {numbers}"
            )

    def of_first(self, num_chunks: int) -> UnitSizes:
        """The sizes of a microbatch that has only so many chunks.

        Raises:
            ValueError: if there are fewer.
        """
        if any(len(row) < num_chunks for row in self.activations):
            raise ValueError(f"a microbatch has {num_chunks} chunks; the tables have {[*map(len, self.activations)]}")

        def cut(table: Sizes) -> Sizes:
            return tuple(row[:num_chunks] for row in table)

        return UnitSizes(cut(self.activations), cut(self.deferred), cut(self.keys_values))

    @classmethod
    def one_each(cls, num_stages: int, num_chunks: int) -> UnitSizes:
        """Sizes that count units: 1 from the start of a forward to the end of its backward, or of its W if split."""
        ones, zeros = (((number,) * num_chunks,) * num_stages for number in (1, 0))
        return cls(activations=ones, deferred=ones, keys_values=zeros)


StepSizes: TypeAlias = UnitSizes | Sequence[UnitSizes]
"""What the units of a step take: sizes of all microbatches, or of each.

Where they are of all, a microbatch with fewer chunks takes the first of every stage.
"""


def memory_over_time(timeline: Iterable[Event], num_ranks: int, sizes: StepSizes) -> list[list[tuple[Time, float]]]:
    """What every rank holds, as the points where it changes; between them it is constant.

    Args:
        timeline: a step, simulated or measured. On a stage without any backward a unit's activations end with its
            forward, and the keys and values of a microbatch with the forward of its last chunk.
        num_ranks: ranks of the timeline.
        sizes: what the units take.

    Returns:
        For every rank, (time, held from then on), in order of time. Where several changes fall on one time, each of
        them is a point, in the order in which they happen; the last one holds.
    """
    rows: list[list[Event]] = [[] for _ in range(num_ranks)]
    for event in timeline:
        if event.action.computes:
            rows[event.rank].append(event)
    trained = {event.action.stage for row in rows for event in row if event.action.kind is not Kind.F}
    chunks = chunks_of(event.action for row in rows for event in row)
    changes = [_changes(one, trained) for one in _of_each(sizes, chunks)]
    curves = []
    for row in rows:
        curve: list[tuple[Time, float]] = []
        held: float = 0
        for event in sorted(row, key=lambda event: event.start):
            kind, stage, (microbatch, chunk) = event.action
            for time, table in zip((event.start, event.end), changes[microbatch][kind], strict=True):
                if table[stage][chunk]:
                    held += table[stage][chunk]
                    curve.append((time, held))
        curves.append(curve)
    return curves


def chunks_of(actions: Iterable[Action]) -> tuple[int, ...]:
    """How many chunks every microbatch of a step has."""
    most: dict[int, int] = {}
    for action in actions:
        microbatch, chunk = action.unit
        most[microbatch] = max(most.get(microbatch, 1), chunk + 1)
    return tuple(most.get(microbatch, 1) for microbatch in range(max(most, default=-1) + 1))


def peaks(plan: Plan, sizes: StepSizes, rows: Sequence[Sequence[int]] | None = None) -> list[float]:
    """The most that every rank holds at once when it runs its actions in some order; times do not matter.

    Args:
        plan: whose actions.
        sizes: what its units hold.
        rows: codes of every rank's compute actions in the order in which they run; the plan's when None.
    """
    trained = {stage for stage in range(plan.num_stages) if plan.trains_stage(stage)}
    changes = [_changes(one, trained) for one in _of_each(sizes, plan.chunks)]
    # By code and in one plain loop, because a planner asks this of thousands of plans.
    at_start, at_end = (
        [
            [change for stage in range(plan.num_stages) for one in changes for change in one[kind][when][stage]]
            for kind in KINDS[:4]
        ]
        for when in (0, 1)
    )
    highest = []
    for row in plan.compute_rows if rows is None else rows:
        held: float = 0
        peak: float = 0
        for code in row:
            kind, index = code & 7, code >> 3
            held += at_start[kind][index]
            if held > peak:
                peak = held
            held += at_end[kind][index]
            if held > peak:
                peak = held
        highest.append(peak)
    return highest


def _of_each(sizes: StepSizes, chunks: Sequence[int]) -> list[UnitSizes]:
    """The sizes of every microbatch; those of microbatches with as many chunks are the same object.

    Raises:
        ValueError: if there are fewer microbatches or chunks.
    """
    if isinstance(sizes, UnitSizes):
        by_count = {count: sizes.of_first(count) for count in set(chunks)}
        return [by_count[count] for count in chunks]
    if len(sizes) < len(chunks):
        raise ValueError(f"sizes of {len(sizes)} microbatches were given for {len(chunks)}")
    return [one.of_first(count) for one, count in zip(sizes, chunks, strict=False)]


_Table = list[list[float]]


def _changes(sizes: UnitSizes, trained: Collection[int]) -> dict[Kind, tuple[_Table, _Table]]:
    """By how much an action changes what its rank holds, when it starts and when it ends, by stage and chunk."""

    def table(change: Callable[[int, int], float]) -> _Table:
        return [[change(stage, chunk) for chunk in range(len(row))] for stage, row in enumerate(sizes.activations)]

    activations, deferred, keys_values = sizes.activations, sizes.deferred, sizes.keys_values

    def freed_with(last: int, stage: int, chunk: int) -> float:
        return -activations[stage][chunk] - (sum(keys_values[stage]) if chunk == last else 0)

    nothing = table(lambda stage, chunk: 0)
    forward = table(lambda stage, chunk: activations[stage][chunk] + keys_values[stage][chunk])
    forward_end = table(
        lambda stage, chunk: 0 if stage in trained else freed_with(len(activations[stage]) - 1, stage, chunk)
    )
    backward = table(lambda stage, chunk: freed_with(0, stage, chunk))
    input_grad = table(lambda stage, chunk: freed_with(0, stage, chunk) + deferred[stage][chunk])
    weight_grad = table(lambda stage, chunk: -deferred[stage][chunk])
    return {
        Kind.F: (forward, forward_end),
        Kind.B: (nothing, backward),
        Kind.I: (nothing, input_grad),
        Kind.W: (nothing, weight_grad),
    }
