"""What a microbatch gives when all that is asked of it is its loss, a sum over its chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class SummedLoss:
    """The part of `runtime.stage.MicrobatchState` that concerns the last stage, for losses that add up over chunks."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self._put_off: dict[int, Callable[[Tensor | None], tuple[Tensor, Tensor | None]]] = {}

    def add_loss(self, loss: Tensor) -> None:
        """Add a chunk's loss, 0-d."""
        # In float32 at least: under bf16-true a bfloat16 sum would lose the small chunks.
        loss = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        self._loss = loss if self._loss is None else self._loss + loss

    def put_off(self, chunk: int, compute: Callable[[Tensor | None], tuple[Tensor, Tensor | None]]) -> None:
        """Let the loss of a chunk be computed by its backward.

        Args:
            chunk: the chunk.
            compute: given a factor of gradients, 0-d, None for 1, gives the loss, 0-d, and so many times the gradient
                of what the stage's forward returned, None if it has none.
        """
        self._put_off[chunk] = compute

    def seed(self, chunk: int, scale: Tensor | None = None) -> Tensor | None:
        """The gradient of a loss that was put off, which is computed now; else the scale: F gave the loss itself."""
        if chunk not in self._put_off:
            return scale
        loss, gradient = self._put_off.pop(chunk)(scale)
        self.add_loss(loss)
        return gradient

    def result(self) -> Mapping[str, Tensor]:
        """The loss of all chunks, 0-d."""
        assert self._loss is not None, "asked on the last stage, after its last chunk"
        return {"loss": self._loss}
