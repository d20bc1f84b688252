"""Says on stderr how far long work is, once it has turned out to be long."""

from __future__ import annotations

import sys
import time

PATIENCE = 2.0
"""Seconds of work about which nothing is said, and between two messages."""


class Progress:
    """Says it every few seconds.

    Args:
        what: what is counted, in the plural.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._next = time.monotonic() + PATIENCE

    def __call__(self, done: int, total: int) -> None:
        """Say how much is done, if it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PATIENCE
            print(f"{done} of {total} {self.what}", file=sys.stderr, flush=True)
