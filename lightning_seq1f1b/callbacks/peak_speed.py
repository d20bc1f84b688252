"""What a device could reach at most, against which model FLOPs utilisation is measured."""

from __future__ import annotations

import torch

from lightning_seq1f1b.schedule.estimate import MACHINES

_SLOWER = ("pcie", "nvl")
"""Parts of the names of devices that reach less than the one that is called the same otherwise."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s that the vendor names for dense products in 16 bits; None where that is not known.

    Args:
        device: of this process.
        precision: of the Trainer, by Lightning's name; those of 32 and 64 bits have no one peak.
    """
    if device.type != "cuda" or "16" not in precision:
        return None
    name = torch.cuda.get_device_name(device).lower()
    if any(part in name for part in _SLOWER) and "a100" not in name:
        return None
    return next((machine.peak_flops for preset, machine in MACHINES.items() if preset in name), None)
