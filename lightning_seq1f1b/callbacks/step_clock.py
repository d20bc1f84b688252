"""How long training steps take, and how much of that the Trainer waits for data."""

from __future__ import annotations

import time
from typing import Any

import lightning as L

_FETCHING = "[_TrainingEpochLoop].train_dataloader_next"
"""What the Trainer calls its wait for the next batch, to whichever profiler it has."""


class StepClock:
    """Times batches from end to end. Validation, checkpoints and what happens between epochs do not count.

    Args:
        trainer: whose profiler is listened to, between `start` and `stop`.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._profiler: Any = trainer.profiler  # type: ignore[attr-defined]  # the class does not declare it
        self._fetch_began: float | None = None
        self._batch_began = self._batch_ended = 0.0
        self._interrupted = True
        self._fetching = 0.0
        self.seconds = self.data_seconds = 0.0
        """Of the batches since `clear`."""

    def start(self) -> None:
        """Listen to the profiler, which the Trainer tells when it starts and stops to wait for data."""
        profiler = self._profiler
        begin, end = profiler.start, profiler.stop

        def start(action_name: str) -> None:
            begin(action_name)
            if action_name == _FETCHING:
                self._fetch_began = time.perf_counter()

        def stop(action_name: str) -> None:
            if action_name == _FETCHING and self._fetch_began is not None:
                self._fetching += time.perf_counter() - self._fetch_began
                self._fetch_began = None
            end(action_name)

        profiler.start, profiler.stop = start, stop

    def stop(self) -> None:
        """Leave the profiler as it was."""
        for name in ("start", "stop"):
            vars(self._profiler).pop(name, None)

    def interrupt(self) -> None:
        """Something other than training goes on until the next batch."""
        self._interrupted = True

    def batch_begins(self) -> None:
        """The next batch is here."""
        self._batch_began = time.perf_counter()

    def batch_ends(self) -> None:
        """The batch is done, as far as the host is concerned."""
        now = time.perf_counter()
        if self._interrupted:
            self.seconds += self._fetching + now - self._batch_began
        else:
            self.seconds += now - self._batch_ended
        self.data_seconds += self._fetching
        self._batch_ended, self._interrupted, self._fetching = now, False, 0.0

    def clear(self) -> None:
        """Start again from zero."""
        self.seconds = self.data_seconds = 0.0
