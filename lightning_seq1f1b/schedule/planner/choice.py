"""The planner's answer for a program that trains, instead of a report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_seq1f1b.schedule.planner.prediction import Prediction
from lightning_seq1f1b.schedule.planner.problem import Problem
from lightning_seq1f1b.schedule.planner.search import search

BUDGET = 500_000
"""What one choice may spend: about two seconds of one core, because it is made between two training steps."""


@dataclass(frozen=True)
class Choice:
    """How to run a step.

    Attributes:
        schedule: name of the schedule.
        virtual_stages: stages on each rank.
        num_chunks: chunks of every row.
        memory_knob: extra warm-up forwards for each rank behind; None for the schedule's own.
        partition: 0 for equal tokens, 1 for equal work, in between, or the chunks' lengths.
        layers: layers of every stage.
        prediction: how the step should go.
    """

    schedule: str
    virtual_stages: int
    num_chunks: int
    memory_knob: int | None
    partition: float | tuple[int, ...]
    layers: tuple[int, ...]
    prediction: Prediction


@lru_cache(maxsize=256)
def choose(problem: Problem, budget: int = BUDGET) -> Choice:
    """The best setting of a problem; the same on every process.

    Args:
        problem: what to plan, with the knobs that are not free.
        budget: what the search may spend.

    Raises:
        DoesNotFitError: when no setting fits into `problem.memory`.
        ValueError: for knobs that contradict each other or the model.
    """
    best = search(problem, budget).best
    setting = best.setting
    return Choice(
        schedule=setting.schedule,
        virtual_stages=setting.virtual_stages,
        num_chunks=setting.num_chunks,
        memory_knob=setting.memory_knob,
        partition=setting.partition,
        layers=setting.layers,
        prediction=best,
    )
