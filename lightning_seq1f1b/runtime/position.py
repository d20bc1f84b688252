"""Where in its plan a process is, for whoever asks from another thread or after a failure."""

from __future__ import annotations

import time

from lightning_seq1f1b.schedule.actions import Action, Kind

_DOING = {
    Kind.F: "in the forward",
    Kind.B: "in the backward",
    Kind.I: "in the input gradient",
    Kind.W: "in the weight gradient",
    Kind.SEND_F: "sending the output",
    Kind.SEND_B: "sending the input gradient",
    Kind.RECV_F: "waiting for the input",
    Kind.RECV_B: "waiting for the output gradient",
}


class Position:
    """The place of one process; it writes, any thread reads.

    Noting a place is one write of an attribute, so that it costs nothing in a step and a reader sees all of it or
    nothing.
    """

    def __init__(self) -> None:
        self._now: tuple[Action | str | None, float] = (None, time.monotonic())

    def enter(self, place: Action | str) -> None:
        """Note that the process now executes an action, or does something else that a step consists of, in words."""
        self._now = (place, time.monotonic())

    def leave(self) -> None:
        """Note that the step is over."""
        self._now = (None, time.monotonic())

    def read(self) -> tuple[Action | str | None, float]:
        """The action or words, None between steps; and since when, in seconds of `time.monotonic`."""
        return self._now

    @property
    def stage(self) -> int | None:
        """The stage of the action; None where it is at none."""
        place = self._now[0]
        return place.stage if isinstance(place, Action) else None

    def __str__(self) -> str:
        """In words: "in the backward of microbatch 0, chunk 3"; "" between steps."""
        return in_words(self._now[0])


def in_words(place: Action | str | None) -> str:
    """What a process does at a place: "in the backward of microbatch 0, chunk 3", or "" at none."""
    if isinstance(place, Action):
        return f"{_DOING[place.kind]} of microbatch {place.unit.microbatch}, chunk {place.unit.chunk}"
    return place or ""
