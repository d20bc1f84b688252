"""Actions as integers: plans of a million actions are ordered, checked and timed in this form.

The units of a stage are numbered microbatch after microbatch, chunk after chunk; those of the next stage follow. An
action has the code 8 * index + kind. So the previous chunk is one index away, and the same unit on the previous stage
as many as a stage has units.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lightning_seq1f1b.schedule.actions import Action, Kind, Unit

KINDS = tuple(Kind)
"""The kinds by number: compute actions first."""

F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B = range(8)  # noqa: E741 (the field's name for the input gradient)

_NUMBER = {kind: number for number, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class Codes:
    """The numbering of one step's actions.

    Attributes:
        num_stages: stages of the model.
        chunks: chunks of each microbatch.
    """

    num_stages: int
    chunks: tuple[int, ...]

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the step."""
        return len(self.chunks)

    @property
    def num_chunks(self) -> int:
        """Chunks of the microbatch that has most."""
        return max(self.chunks)

    @property
    def alike(self) -> bool:
        """Whether all microbatches have as many chunks."""
        return len(set(self.chunks)) == 1

    @property
    def chunks_in_words(self) -> str:
        """For messages: `2 microbatches of 4 chunks`, or `3 microbatches of 4, 2, 1 chunks`."""
        listed = self.chunks[:1] if self.alike else self.chunks
        return f"{self.num_microbatches} microbatches of {', '.join(map(str, listed))} chunks"

    @cached_property
    def units_on_a_stage(self) -> int:
        """Units that pass every stage: the distance between a unit's indices on neighbouring stages."""
        return sum(self.chunks)

    @cached_property
    def lasts(self) -> tuple[int, ...]:
        """For every index, that of the last chunk of its microbatch on its stage; one more entry, -1, ends the table.

        So a chunk is the first of its microbatch when the index before it, which is -1 before index 0, has another
        last chunk.
        """
        ends = [end - 1 for end, count in zip(accumulate(self.chunks), self.chunks, strict=True) for _ in range(count)]
        firsts = range(0, self.num_indices, self.units_on_a_stage)
        return (*(first + end for first in firsts for end in ends), -1)

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        """The index of the first chunk of each microbatch on stage 0."""
        return tuple(accumulate(self.chunks[:-1], initial=0))

    @cached_property
    def _units(self) -> tuple[Unit, ...]:
        """The units by their index on stage 0."""
        return tuple(Unit(microbatch, chunk) for microbatch, count in enumerate(self.chunks) for chunk in range(count))

    @property
    def num_indices(self) -> int:
        """Indices of units on stages; codes are below eight times as many."""
        return self.num_stages * self.units_on_a_stage

    def index(self, stage: int, microbatch: int, chunk: int) -> int:
        """The index of a unit on a stage."""
        return stage * self.units_on_a_stage + self._firsts[microbatch] + chunk

    def encode(self, action: Action) -> int:
        """The action's code.

        Raises:
            ValueError: if the step has no such stage or unit.
        """
        stage, (microbatch, chunk) = action.stage, action.unit
        if not (
            0 <= stage < self.num_stages
            and 0 <= microbatch < self.num_microbatches
            and 0 <= chunk < self.chunks[microbatch]
        ):
            raise ValueError(f"{action} is not of {self.num_stages} stages and {self.chunks_in_words}")
        return 8 * self.index(stage, microbatch, chunk) + _NUMBER[action.kind]

    def decode(self, code: int) -> Action:
        """The inverse of `encode`."""
        index, kind = divmod(code, 8)
        stage, unit = divmod(index, self.units_on_a_stage)
        return Action(KINDS[kind], stage, self._units[unit])

    def encode_row(self, actions: Iterable[Action]) -> tuple[int, ...]:
        """The codes of several actions."""
        return tuple(map(self.encode, actions))

    def decode_row(self, codes: Iterable[int]) -> tuple[Action, ...]:
        """The inverse of `encode_row`."""
        return tuple(map(self.decode, codes))
