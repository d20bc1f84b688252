"""The clocks of a step: a device's, which is read after the fact, and a machine's."""

from __future__ import annotations

import platform
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch


class DeviceClock:
    """Points in time of an accelerator's stream, aligned once to the clock of the host.

    The alignment waits for an event in a stream of its own, in which there is nothing else to wait for, so it takes
    some microseconds however much work is queued in the stream that computes.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor = torch.Event(device, enable_timing=True)
        self._anchor.record(_idle_stream(device))
        self._anchor.synchronize()
        self._host = time.perf_counter()

    def mark(self) -> torch.Event:
        """Note the moment at which the current stream comes to this point; the program goes on."""
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.Event) -> float:
        """When that was, by `time.perf_counter`; the stream must have come there."""
        return self._host + 1e-3 * float(self._anchor.elapsed_time(mark))


@cache
def _idle_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def machine() -> str:
    """What the processes of one machine have in common: they read the same `time.perf_counter`."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()
