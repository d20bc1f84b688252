"""What a microbatch gives when all that is asked of it is its loss, a sum over its chunks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class SummedLoss:
    """The part of `runtime.stage.MicrobatchState` that concerns the last stage, for losses that add up over chunks."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None

    def add_loss(self, loss: Tensor) -> None:
        """Add a chunk's loss, 0-d."""
        # In float32 at least: under bf16-true a bfloat16 sum would lose the small chunks.
        loss = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        self._loss = loss if self._loss is None else self._loss + loss

    def seed(self, chunk: int) -> Tensor | None:
        """None: a loss is where the backward starts, with 1."""
        return None

    def result(self) -> Mapping[str, Tensor]:
        """The loss of all chunks, 0-d."""
        assert self._loss is not None, "asked on the last stage, after its last chunk"
        return {"loss": self._loss}
