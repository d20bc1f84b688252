"""What a batch will take, from its plan and the architecture: the idle share, seconds where speeds are known, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.estimate import MACHINES, Machine, Training, transient_bytes, unit_sizes, unit_times
from lightning_seq1f1b.schedule.memory_curve import peaks
from lightning_seq1f1b.schedule.plan import Plan
from lightning_seq1f1b.schedule.planner.quantities import MESSAGES
from lightning_seq1f1b.schedule.simulate import simulate
from lightning_seq1f1b.schedule.spans import Span


@dataclass(frozen=True)
class Batch:
    """A batch as it was cut.

    Attributes:
        plan: that all ranks execute.
        spans: the chunks of every microbatch.
        rows: of every microbatch.
    """

    plan: Plan
    spans: tuple[tuple[Span, ...], ...]
    rows: tuple[int, ...]

    @property
    def actions(self) -> int:
        """Compute actions of all ranks."""
        return sum(map(len, self.plan.compute_rows))


@dataclass(frozen=True)
class Forecast:
    """What is expected of a batch.

    Attributes:
        idle: share of the step that the ranks wait, by FLOPs.
        seconds: of the step without the optimizer; None where the device's speed is not known.
        activations: bytes of every rank on top of weights, gradients and the optimizer's state.
    """

    idle: float
    seconds: float | None
    activations: tuple[float, ...]


def forecast(
    batch: Batch, shape: ModelShape, layers: Sequence[int], training: Training, machine: Machine | None
) -> Forecast:
    """What a batch takes, from the architecture.

    Args:
        batch: its plan and chunks.
        shape: of the model.
        layers: number of layers of every stage.
        training: how it is trained; `rows` do not matter.
        machine: what it runs on, if that is known.
    """
    each = [(spans, replace(training, rows=rows)) for spans, rows in zip(batch.spans, batch.rows, strict=True)]
    times = tuple(unit_times(shape, layers, *one, machine or MACHINES["a100"]) for one in each)
    simulation = simulate(batch.plan, times, early_weight_grads=True)
    sizes = tuple(unit_sizes(shape, layers, *one) for one in each)
    order = simulation.rows if batch.plan.splits_backward else None
    working = map(
        max,
        zip(
            *(transient_bytes(shape, layers, spans, batch.plan.stage_to_rank, one) for spans, one in each), strict=True
        ),
    )
    messages = 0.0
    if batch.plan.num_ranks > 1:
        longest = max(one.rows * span.length for spans, one in each for span in spans)
        messages = MESSAGES * longest * shape.hidden_size * training.activation_bytes
    held = tuple(units + most + messages for units, most in zip(peaks(batch.plan, sizes, order), working, strict=True))
    makespan = float(simulation.makespan)
    idle = 1 - float(sum(simulation.work)) / (len(simulation.work) * makespan)
    return Forecast(idle, makespan if machine is not None else None, held)
