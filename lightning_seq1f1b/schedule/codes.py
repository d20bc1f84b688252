"""Actions as integers: plans of a million actions are ordered, checked and timed in this form.

A unit on a stage has the index (stage * m + microbatch) * k + chunk, and an action the code 8 * index + kind. So the
previous chunk is one index away, and the same unit on the previous stage m * k of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
        num_microbatches: microbatches of the step.
        num_chunks: chunks of every microbatch.
    """

    num_stages: int
    num_microbatches: int
    num_chunks: int

    @property
    def units_on_a_stage(self) -> int:
        """Units that pass every stage: the distance between a unit's indices on neighbouring stages."""
        return self.num_microbatches * self.num_chunks

    @property
    def num_indices(self) -> int:
        """Indices of units on stages; codes are below eight times as many."""
        return self.num_stages * self.units_on_a_stage

    def index(self, stage: int, microbatch: int, chunk: int) -> int:
        """The index of a unit on a stage."""
        return (stage * self.num_microbatches + microbatch) * self.num_chunks + chunk

    def encode(self, action: Action) -> int:
        """The action's code.

        Raises:
            ValueError: if the step has no such stage or unit.
        """
        stage, (microbatch, chunk) = action.stage, action.unit
        if not (0 <= stage < self.num_stages and 0 <= chunk < self.num_chunks):
            raise ValueError(f"{action} is not of {self.num_stages} stages and {self.num_chunks} chunks")
        if not 0 <= microbatch < self.num_microbatches:
            raise ValueError(f"{action} is not of {self.num_microbatches} microbatches")
        return 8 * self.index(stage, microbatch, chunk) + _NUMBER[action.kind]

    def decode(self, code: int) -> Action:
        """The inverse of `encode`."""
        index, kind = divmod(code, 8)
        rest, chunk = divmod(index, self.num_chunks)
        stage, microbatch = divmod(rest, self.num_microbatches)
        return Action(KINDS[kind], stage, Unit(microbatch, chunk))

    def encode_row(self, actions: Iterable[Action]) -> tuple[int, ...]:
        """The codes of several actions."""
        return tuple(map(self.encode, actions))

    def decode_row(self, codes: Iterable[int]) -> tuple[Action, ...]:
        """The inverse of `encode_row`."""
        return tuple(map(self.decode, codes))
