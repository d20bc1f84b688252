"""Times of actions on a device that runs behind the host, which is made up here: nothing waits for it but reading."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_seq1f1b.runtime import clocks
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.schedule.actions import Action

CUDA = torch.device("cuda", 0)


class Device:
    """A stream that has work, an idle one, and the clock of the host; the device's own clock starts elsewhere."""

    def __init__(self) -> None:
        self.host, self.stream, self.waits = 100.0, 100.0, 0

    def launch(self, seconds: float) -> None:
        """Queue work; takes the host a millisecond."""
        self.host += 1e-3
        self.stream = max(self.stream, self.host) + seconds


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    class Event:
        def __init__(self, place: torch.device, *, enable_timing: bool) -> None:
            assert place == CUDA
            assert enable_timing

        def record(self, stream: object = None) -> None:
            self.at = device.host if stream == "idle" else max(device.stream, device.host)

        def query(self) -> bool:
            return self.at <= device.host

        def synchronize(self) -> None:
            device.waits += not self.query()
            device.host = max(device.host, self.at)

        def elapsed_time(self, other: Event) -> float:
            assert self.query()
            assert other.query(), "read before the device has come there"
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(clocks, "_idle_stream", lambda place: "idle")
    monkeypatch.setattr(time, "perf_counter", lambda: device.host)
    return device


def run(device: Device, trace: StepTrace) -> None:
    """A forward of 2 s, work of 1 s between, and a backward of 4 s, all launched at once."""
    with trace.measure(Action.parse("0F0.0")):
        device.launch(2.0)
    device.launch(1.0)
    with trace.measure(Action.parse("0B0.0")):
        device.launch(4.0)


def test_times_are_those_of_the_device_by_the_clock_of_the_host(device: Device) -> None:
    trace = StepTrace(3, CUDA)
    run(device, trace)
    assert device.waits == 0
    assert not trace.is_over
    device.host += 60.0
    assert trace.is_over
    times = [(event.rank, str(event.action), event.start - 100.0, event.end - 100.0) for event in trace.events]
    expected = [(3, "0F0.0", 0.0, 2.001), (3, "0B0.0", 3.001, 7.001)]
    assert [time[:2] for time in times] == [time[:2] for time in expected]
    assert [time[2:] for time in times] == [pytest.approx(time[2:]) for time in expected]
    assert trace.busy_seconds == pytest.approx(6.001)
    assert device.waits == 0


def test_reading_waits_once_for_the_last_action(device: Device) -> None:
    trace = StepTrace(0, CUDA)
    run(device, trace)
    assert len(trace.events) == len(trace.events) == 2
    assert device.waits == 1
    assert device.host == pytest.approx(107.001)


def test_clocks_are_aligned_without_waiting_for_earlier_work(device: Device) -> None:
    device.launch(50.0)
    trace = StepTrace(0, CUDA)
    run(device, trace)
    assert device.waits == 0
    assert float(trace.events[0].start) == pytest.approx(150.001)


def test_bubble_and_seconds_count_from_the_begin_of_the_step() -> None:
    trace = StepTrace(0, torch.device("cpu"))
    assert (trace.seconds, trace.bubble, trace.is_over) == (0.0, 0.0, True)
    trace.began = time.perf_counter()
    time.sleep(0.02)
    with trace.measure(Action.parse("0F0.0")):
        time.sleep(0.02)
    assert trace.seconds >= 0.04
    assert trace.bubble == pytest.approx(1 - trace.busy_seconds / trace.seconds)
    assert 0.1 < trace.bubble < 0.9
