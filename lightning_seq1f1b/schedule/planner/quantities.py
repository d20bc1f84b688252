"""Seconds and bytes of units, ranks and messages of a problem, for every setting."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from lightning_seq1f1b.schedule.estimate import (
    Resident,
    message_seconds,
    resident_bytes,
    transient_bytes,
    unit_sizes,
    unit_times,
)
from lightning_seq1f1b.schedule.memory_curve import UnitSizes
from lightning_seq1f1b.schedule.planner.problem import Problem
from lightning_seq1f1b.schedule.planner.settings import Setting
from lightning_seq1f1b.schedule.spans import Span
from lightning_seq1f1b.schedule.unit_times import UnitTimes

MESSAGES = 4
"""Messages that a rank holds at once: one each way in each direction."""


class Quantities:
    """What settings have in common is computed once.

    Attributes:
        problem: the problem.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._times = lru_cache(maxsize=None)(self._unit_times)
        self._sizes = lru_cache(maxsize=None)(self._unit_sizes)
        self._resident = lru_cache(maxsize=None)(self._resident_bytes)
        self._working = lru_cache(maxsize=None)(self._working_bytes)

    def times(self, setting: Setting) -> UnitTimes:
        """Seconds of its units."""
        return self._times(setting.layers, setting.spans(self.problem))

    def sizes(self, setting: Setting) -> UnitSizes:
        """Bytes of its units."""
        return self._sizes(setting.layers, setting.spans(self.problem))

    def resident(self, setting: Setting) -> Sequence[Resident]:
        """Bytes that every rank holds from step to step."""
        return self._resident(setting.layers)

    def working(self, setting: Setting) -> Sequence[float]:
        """Bytes that an action of every rank makes and frees again, at most."""
        return self._working(setting.layers, setting.spans(self.problem))

    def latency(self, setting: Setting) -> float:
        """Seconds of a message; the mean over the chunks."""
        problem, chunks = self.problem, setting.spans(self.problem)
        if problem.num_ranks == 1:
            return 0.0
        seconds = [message_seconds(problem.shape, span, problem.training, problem.machine) for span in chunks]
        return sum(seconds) / len(seconds)

    def buffers(self, setting: Setting) -> float:
        """Bytes of messages on their way, of any rank."""
        problem = self.problem
        if problem.num_ranks == 1:
            return 0.0
        longest = max(span.length for span in setting.spans(problem))
        message = problem.training.rows * longest * problem.shape.hidden_size * problem.training.activation_bytes
        return MESSAGES * message

    def _unit_times(self, layers: tuple[int, ...], spans: tuple[Span, ...]) -> UnitTimes:
        problem = self.problem
        return unit_times(problem.shape, layers, spans, problem.training, problem.machine, problem.profile)

    def _unit_sizes(self, layers: tuple[int, ...], spans: tuple[Span, ...]) -> UnitSizes:
        return unit_sizes(self.problem.shape, layers, spans, self.problem.training)

    def _resident_bytes(self, layers: tuple[int, ...]) -> Sequence[Resident]:
        return resident_bytes(self.problem.shape, layers, self._ranks(layers), self.problem.training)

    def _working_bytes(self, layers: tuple[int, ...], spans: tuple[Span, ...]) -> Sequence[float]:
        return transient_bytes(self.problem.shape, layers, spans, self._ranks(layers), self.problem.training)

    def _ranks(self, layers: tuple[int, ...]) -> list[int]:
        return [stage % self.problem.num_ranks for stage in range(len(layers))]
