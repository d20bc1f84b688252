"""Notices that a rank does not get on, and tells where all ranks are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_seq1f1b.runtime.position import Position, in_words
from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.strategy.whereabouts import BETWEEN_STEPS, DATA_LOADER, of_thread

PAUSE_S = 5.0
"""A thread that looks twice a second and was kept from it for so long was stopped with its process, or the process was
busy in a call that holds Python's interpreter: in neither case does the time count."""


@dataclass(frozen=True)
class Standing:
    """Where a rank is.

    Attributes:
        words: "in the backward of microbatch 0, chunk 3".
        seconds: how long it has been there.
        stage: of the action it executes; None at none.
        waits: whether it waits for another rank, or for data, without which none gets on.
        is_awaited: whether it is at something of its own, for which others may wait.
    """

    words: str
    seconds: float
    stage: int | None
    waits: bool
    is_awaited: bool


class MainThread:
    """Watches one thread from another one.

    Args:
        position: what the thread notes in a step.
        thread: its identity.
    """

    def __init__(self, position: Position, thread: int) -> None:
        self._position, self._thread = position, thread
        self._at: object = None
        self._since = self._looked = time.monotonic()

    def look(self) -> Standing:
        """Where the thread is now; to be called about twice a second."""
        now = time.monotonic()
        pause = now - self._looked
        self._looked = now
        place, entered = self._position.read()
        words, distributed = in_words(place), False
        if not words:
            words, distributed = of_thread(self._thread)
        at = (entered, words, distributed)
        if at != self._at:
            self._at, self._since = at, entered if place is not None else now
        elif pause > PAUSE_S:
            self._since += pause
        loading = words == DATA_LOADER
        awaited = not (distributed or words.startswith("waiting"))
        if distributed:
            words = f"waiting for other ranks {words}"
        waits = place is not None or distributed or loading
        stage = place.stage if isinstance(place, Action) else None
        return Standing(words, now - self._since, stage, waits, awaited)


def report(
    standings: Mapping[int, Standing],
    silent: Mapping[int, str],
    patience_s: float,
    who: Callable[[int, int | None], str],
    num_stages: int,
) -> str:
    """What to say of a stall; the likeliest cause comes last.

    Args:
        standings: of the ranks that have answered.
        silent: of the others, when and where they were last heard of, " 8.2 s before, between steps"; "" if never.
        patience_s: how long a rank waits for another one.
        who: names a rank, and the stage of its action if it is at one: "rank 2 (stage 2 of replica 0)".
        num_stages: pipeline ranks of one replica.
    """
    lines = ["rank  stage  seconds  where"]
    for rank in sorted((*standings, *silent)):
        at = standings.get(rank)
        stage = rank % num_stages if at is None or at.stage is None else at.stage
        words = f"does not answer{_since(silent[rank])}" if at is None else at.words
        lines.append(f"{rank:4}  {stage:5}  {'' if at is None else f'{at.seconds:.1f}':>7}  {words}")
    table, cause = "\n".join(lines), _cause(standings, silent, who)
    return f"the run has stalled: a rank has waited for {patience_s:g} s, the timeout.\n\n{table}\n\n{cause}"


def _cause(standings: Mapping[int, Standing], silent: Mapping[int, str], who: Callable[[int, int | None], str]) -> str:
    if silent:
        return "\n".join(
            f"{who(rank, None)} does not answer: it is stopped, or in a call that keeps Python's interpreter"
            f"{_since(last)}"
            for rank, last in silent.items()
        )
    awaited = [(rank, at) for rank, at in standings.items() if at.is_awaited]
    if awaited:
        return "\n".join(
            f"{who(rank, at.stage)} waits for no other rank: for {at.seconds:.1f} s it has been "
            f"{'somewhere ' if at.words == BETWEEN_STEPS else ''}{at.words}"
            for rank, at in awaited
        )
    return "every rank waits for another one: they do not agree on what comes next"


def _since(last: str) -> str:
    return f" (last heard of{last})" if last else ""
