"""The learning rate over a run: a linear warm-up, then a decay to zero."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate_factor(
    step: int, warmup_steps: int, total_steps: float, decay: Literal["cosine", "linear", "none"]
) -> float:
    """What the highest learning rate is multiplied by in an optimizer step, a number in [0, 1].

    Args:
        step: the optimizer step, 0 first.
        warmup_steps: steps of the rise; step `warmup_steps - 1` has the highest rate, and step 0 is never zero.
        total_steps: steps of the whole run; infinite when it has no end, and then nothing decays.
        decay: the shape of the fall, which reaches zero at `total_steps`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if decay == "none" or math.isinf(total_steps):
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1.0, total_steps - warmup_steps))
    return 1.0 - done if decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
