"""The states of a process's random numbers, as plain values and tensors that a checkpoint can hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

RandomState = dict[str, Any]
"""States of the generators that programs use without naming one, by library; and of the device's, where it has one."""


def random_state(device: torch.device | None = None) -> RandomState:
    """The states of this process.

    Args:
        device: an accelerator whose generator counts too.
    """
    version, words, gauss = random.getstate()
    kind, keys, *place = numpy.random.get_state()
    assert isinstance(keys, numpy.ndarray)
    state: RandomState = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype("int64")), *place],
    }
    if device is not None and device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: RandomState, device: torch.device | None = None) -> None:
    """Go on from saved states; the device's only where one is given and saved."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *place = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *place))
    if device is not None and device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)


@contextmanager
def drawing_from(state: RandomState) -> Iterator[None]:
    """Inside, random numbers come from another state; afterwards from where they were before."""
    before = random_state()
    set_random_state(state)
    try:
        yield
    finally:
        set_random_state(before)
