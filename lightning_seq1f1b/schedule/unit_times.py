"""Times of units: forward, input gradient and weight gradient, of every chunk on every stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.timeline import Time


@dataclass(frozen=True)
class UnitTimes:
    """What the units of one microbatch take; a cost function of compute actions.

    Attributes:
        forward: time of F, by stage and chunk.
        input_grad: time of I, by stage and chunk.
        weight_grad: time of W, by stage and chunk.
    """

    forward: tuple[tuple[Time, ...], ...]
    input_grad: tuple[tuple[Time, ...], ...]
    weight_grad: tuple[tuple[Time, ...], ...]

    def __call__(self, action: Action) -> Time:
        """The time of a compute action; a B takes as long as its I and its W."""
        stage, chunk = action.stage, action.unit.chunk
        if action.kind is Kind.F:
            return self.forward[stage][chunk]
        if action.kind is Kind.I:
            return self.input_grad[stage][chunk]
        if action.kind is Kind.W:
            return self.weight_grad[stage][chunk]
        return self.input_grad[stage][chunk] + self.weight_grad[stage][chunk]


StepTimes: TypeAlias = UnitTimes | tuple[UnitTimes, ...]
"""What the units of a step take: times of all microbatches, or of each.

Where they are of all, a microbatch with fewer chunks takes the first of every stage.
"""
