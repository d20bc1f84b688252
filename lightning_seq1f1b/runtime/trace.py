"""Times what a rank computes in one step, in the record type of the simulator, so that both can be compared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from lightning_seq1f1b.runtime.clocks import DeviceClock
from lightning_seq1f1b.runtime.step_load import Load
from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.plan import Plan
from lightning_seq1f1b.schedule.spans import Span
from lightning_seq1f1b.schedule.timeline import Event, busy_time


@dataclass
class StepTrace:
    """The computing of one rank in one step.

    Timing never waits for an accelerator: events go into its stream, and whoever first reads the times waits until the
    stream has come past the last of them.

    Attributes:
        rank: pipeline rank.
        device: where the rank computes.
        plan: what was executed.
        spans: for every microbatch the chunks' token ranges.
        load: how much there was to compute.
        began: when this rank knew that all ranks hold the batch, and started: one moment on all of them but for the
            time of a message. In seconds of `time.perf_counter`, as all times here.
    """

    rank: int
    device: torch.device
    plan: Plan | None = None
    spans: tuple[tuple[Span, ...], ...] = ()
    load: Load | None = None
    began: float | None = None
    _clock: DeviceClock | None = field(default=None, init=False, repr=False)
    _pending: list[tuple[Action, torch.Event, torch.Event]] = field(default_factory=list, init=False, repr=False)
    _events: list[Event] = field(default_factory=list, init=False, repr=False)

    def begin(self, plan: Plan, spans: tuple[tuple[Span, ...], ...], load: Load) -> None:
        """The ranks have agreed on the batch and its plan."""
        self.plan, self.spans, self.load = plan, spans, load
        self.began = time.perf_counter()

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        """Time the body as `action`."""
        if self.device.type == "cpu":
            start = self._now()
            yield
            self._events.append(Event(self.rank, action, start, self._now()))
            return
        if self._clock is None:
            self._clock = DeviceClock(self.device)
        began = self._clock.mark()
        yield
        self._pending.append((action, began, self._clock.mark()))

    @property
    def is_over(self) -> bool:
        """Whether the times can be read without waiting for the device."""
        return not self._pending or self._pending[-1][2].query()

    @property
    def events(self) -> list[Event]:
        """One for each compute action in the order in which they ran, which for W may differ from the plan's.

        In seconds of a clock that all processes of one machine share.
        """
        if self._pending:
            assert self._clock is not None
            self._pending[-1][2].synchronize()
            seconds = self._clock.seconds
            self._events += [Event(self.rank, action, seconds(a), seconds(b)) for action, a, b in self._pending]
            self._pending = []
        return self._events

    @property
    def seconds(self) -> float:
        """How long this rank was in the step: from its begin to the end of its last action."""
        if not self.events:
            return 0.0
        start = float(self.events[0].start) if self.began is None else self.began
        return float(self.events[-1].end) - start

    @property
    def busy_seconds(self) -> float:
        """How long it computed."""
        return float(busy_time(self.events).get(self.rank, 0.0))

    @property
    def bubble(self) -> float:
        """The share of `seconds` in which this rank had nothing to do.

        A rank that ends before others is idle until they end, too, and does not know how long that is:
        `PipelineMonitor` compares the ranks.
        """
        return 1 - self.busy_seconds / self.seconds if self.events else 0.0

    def _now(self) -> float:
        return time.perf_counter()


def measured(trace: StepTrace | None, action: Action) -> AbstractContextManager[None]:
    """Times the body as `action` where there is a trace."""
    return nullcontext() if trace is None else trace.measure(action)
