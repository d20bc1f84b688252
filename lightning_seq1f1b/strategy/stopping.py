"""What the user asks for by signals: from the moment one arrives on any rank until all ranks obey it together."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection

from lightning_seq1f1b.strategy.forced_end import say

SECOND_AFTER_S = 1.0
"""Less time between two interrupts makes them one: a terminal sends it to a launcher too, which passes it on."""


class StopRequests:
    """One process's part: rank 0's decides, the others' tell it.

    Args:
        handled: the signals that wait for the end of a batch.
        decides: whether this is rank 0.

    Attributes:
        pending: the signal that has arrived on this rank and was not obeyed yet.
        hears_directly: whether the watching thread hears of signals from the system, at once; the main thread's
            handlers run when the call that it is in returns.
    """

    def __init__(self, handled: Collection[int], *, decides: bool) -> None:
        self._handled, self._decides = handled, decides
        self.hears_directly = False
        self._unsent: int | None = None
        self._wanted: int | None = None
        self._first_interrupt: float | None = None
        self.pending: int | None = None

    def note(self, number: int) -> None:
        """A signal has arrived on this rank; called in its handler."""
        self.pending = number
        if not self.hears_directly:
            self._unsent = number

    def hear(self, number: int) -> None:
        """The same; called by the watching thread."""
        if number in self._handled:
            self._unsent = number

    def take_unsent(self) -> int | None:
        """What rank 0 must be told of, once; called by the watching thread."""
        number, self._unsent = self._unsent, None
        if self._decides and number is not None:
            self.ask(number)
            return None
        return number

    def ask(self, number: int) -> None:
        """Some rank asks for it; called on rank 0 by the watching thread."""
        if number == signal.SIGINT and self._wanted != number:
            say("interrupted: training stops at the end of this batch, on all ranks. Interrupt it again to end at once")
        if number == signal.SIGTERM and self._wanted != number:
            say("SIGTERM: training stops at the end of this batch, on all ranks")
        if self._wanted not in (signal.SIGINT, signal.SIGTERM):  # which end the run; others do not
            self._wanted = number

    def take_wanted(self) -> int:
        """What all ranks shall do now, 0 for nothing; called on rank 0 by its main thread, between batches."""
        number, self._wanted = self._wanted, None
        return number or 0

    def is_impatient(self) -> bool:
        """Whether an interrupt that has just arrived is not the first one."""
        now = time.monotonic()
        if self._first_interrupt is None:
            self._first_interrupt = now
        return now - self._first_interrupt > SECOND_AFTER_S
