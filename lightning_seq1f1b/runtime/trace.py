"""Times what a rank computes in one step, in the record type of the simulator, so that both can be compared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.plan import Plan
from lightning_seq1f1b.schedule.spans import Span
from lightning_seq1f1b.schedule.timeline import Event


@dataclass
class StepTrace:
    """The computing of one rank in one step.

    Attributes:
        rank: pipeline rank.
        device: on an accelerator every timed action is surrounded by synchronisations, which costs speed; on the CPU
            timing is free.
        plan: what was executed.
        spans: for every microbatch the chunks' token ranges.
        events: one for each compute action in the order in which they ran, which for W may differ from the plan's; in
            seconds of a clock that all processes of one machine share.
    """

    rank: int
    device: torch.device
    plan: Plan | None = None
    spans: tuple[tuple[Span, ...], ...] = ()
    events: list[Event] = field(default_factory=list)

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        """Time the body as `action`."""
        start = self._now()
        yield
        self.events.append(Event(self.rank, action, start, self._now()))

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def measured(trace: StepTrace | None, action: Action) -> AbstractContextManager[None]:
    """Times the body as `action` where there is a trace."""
    return nullcontext() if trace is None else trace.measure(action)
