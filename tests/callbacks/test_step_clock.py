"""The time of steps: from end to end, without what is no training, on a clock that is moved by hand."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_seq1f1b.callbacks.step_clock import _FETCHING, StepClock


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def batch(clock: StepClock, profiler: PassThroughProfiler, passes, *, fetch: float, step: float) -> None:
    passes(0.5)  # the Trainer's own work
    profiler.start("another action")
    profiler.start(_FETCHING)
    passes(fetch)
    profiler.stop(_FETCHING)
    clock.batch_begins()
    passes(step)
    clock.batch_ends()


def test_steps_last_from_end_to_end_but_for_interruptions(passes) -> None:
    profiler = PassThroughProfiler()
    clock = StepClock(SimpleNamespace(profiler=profiler))
    clock.start()
    batch(clock, profiler, passes, fetch=2.0, step=10.0)
    assert (clock.seconds, clock.data_seconds) == (12.0, 2.0)  # the first one has no end before it
    batch(clock, profiler, passes, fetch=3.0, step=10.0)
    assert (clock.seconds, clock.data_seconds) == (12.0 + 13.5, 5.0)
    clock.clear()
    clock.interrupt()
    passes(1000.0)  # validation, or a checkpoint
    batch(clock, profiler, passes, fetch=1.0, step=10.0)
    assert (clock.seconds, clock.data_seconds) == (11.0, 1.0)
    clock.stop()
    batch(clock, profiler, passes, fetch=4.0, step=10.0)
    assert clock.data_seconds == 1.0
    assert vars(profiler).keys() == vars(PassThroughProfiler()).keys()
