"""The words of a schedule: one action is a kind, a stage and a unit, and its text form parses back."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """What an action does. B is the whole backward; I and W are its two halves.

    A send or receive is named after the compute action on its own stage: SEND_F at stage s sends the output of F(s, u)
    to stage s + 1, RECV_F receives the input of F(s, u), SEND_B sends the input gradient of B(s, u) to stage s - 1,
    RECV_B receives the output gradient for B(s, u).
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 (the field's name for the input gradient)
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
"""The kinds that take a rank's time; the others only start a transfer."""


# Units and actions are tuples rather than dataclasses because they are looked up all the time: hashing and comparing
# tuples is several times faster, and a plan may hold a million actions.


class Unit(NamedTuple):
    """One chunk of one microbatch: what the schedule moves. Both numbers count from 0."""

    microbatch: int
    chunk: int

    def __str__(self) -> str:
        """`1.2` is chunk 2 of microbatch 1."""
        return f"{self.microbatch}.{self.chunk}"


class Action(NamedTuple):
    """One instruction of a plan.

    `str` and `parse` are inverses: `0F1.2` is the forward of microbatch 1, chunk 2 on stage 0; `3SEND_B0.1` sends the
    input gradient of microbatch 0, chunk 1 from stage 3 to stage 2.
    """

    kind: Kind
    stage: int
    unit: Unit

    @property
    def computes(self) -> bool:
        """Whether the action runs layers, rather than starting a transfer."""
        return self.kind in COMPUTE

    def __str__(self) -> str:
        """The text form that `parse` reads."""
        return f"{self.stage}{self.kind.value}{self.unit}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action's text form.

        Raises:
            ValueError: if `text` is not `<stage><kind><microbatch>.<chunk>`.
        """
        match = _TEXT_FORM.fullmatch(text)
        if match is None:
            kinds = ", ".join(kind.value for kind in Kind)
            raise ValueError(
                f"{text!r} is no action like '0F1.2': <stage><kind><microbatch>.<chunk>, with a kind of {kinds}"
            )
        stage, kind, microbatch, chunk = match.groups()
        return cls(Kind(kind), int(stage), Unit(int(microbatch), int(chunk)))


_TEXT_FORM = re.compile(r"(\d+)(" + "|".join(kind.value for kind in Kind) + r")(\d+)\.(\d+)", re.ASCII)
