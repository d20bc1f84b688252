"""The most memory that a process has held so far."""

from __future__ import annotations

import sys
from contextlib import suppress
from math import nan
from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> float:
    """Bytes that tensors have held on an accelerator at once, or a process in memory where it computes on the CPU.

    NaN where the system does not tell.
    """
    if device.type != "cpu":
        return float(torch.accelerator.max_memory_allocated(device))
    with suppress(OSError, StopIteration):
        status = Path("/proc/self/status").read_text().splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else 1024 * peak)
    return nan
