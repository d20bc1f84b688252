"""The weight gradients that are due on one rank: run in their order, in time left over, and no later than planned."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from lightning_seq1f1b.runtime.finite import FiniteCheck
from lightning_seq1f1b.runtime.position import Position
from lightning_seq1f1b.runtime.split_backward import DeferredGradients
from lightning_seq1f1b.runtime.trace import StepTrace, measured
from lightning_seq1f1b.schedule.actions import Action

_POLL_S = 2e-5
"""How long to sleep between two looks at a busy device; far below the time of a chunk."""


class WeightQueue:
    """First in, first out.

    Args:
        trace: collects the times of the actions.
        device: where the stages compute.
        position: where it notes the action that it runs.
        finite: looks at the gradients that an action gives.
    """

    def __init__(
        self, trace: StepTrace | None, device: torch.device, position: Position, finite: FiniteCheck | None = None
    ) -> None:
        self._trace, self._position, self._finite = trace, position, finite
        self._due: deque[tuple[Action, DeferredGradients]] = deque()
        self._planned = self.done = 0
        # A device runs behind the program that launches its work, and is not idle while that waits for a message.
        self._last_launch = None if device.type == "cpu" else torch.Event(device)

    def __len__(self) -> int:
        """How many are due."""
        return len(self._due)

    def add(self, action: Action, gradients: DeferredGradients) -> None:
        """A W whose I has run."""
        self._due.append((action, gradients))

    def launched(self) -> None:
        """To be called when the work of a compute action has been handed to the device."""
        if self._last_launch is not None and self._due:
            self._last_launch.record()

    def run_oldest(self) -> None:
        """Run the one that has been due for longest."""
        action, gradients = self._due.popleft()
        self._position.enter(action)
        with measured(self._trace, action):
            gradients.accumulate()
        if self._finite is not None:
            self._finite.weight(action)
        self.done += 1
        self.launched()

    def run_planned(self) -> None:
        """The plan has a W here: run one unless as many as planned so far have run before their places."""
        self._planned += 1
        if self.done < self._planned:
            self.run_oldest()

    def fill(self, is_here: Callable[[], bool]) -> None:
        """While a message is awaited and the device has nothing else to do, run what is due."""
        while self._due and not is_here():
            if self._last_launch is None or self._last_launch.query():
                self.run_oldest()
            else:
                time.sleep(_POLL_S)
