"""A value that every chunk hands to the next one, such as a recurrent state, and whose gradient comes back."""

from __future__ import annotations

import torch
from torch import Tensor


class Carry:
    """One recurrent value of one layer for one microbatch.

    The next chunk reads a detached copy that collects a gradient; in the backward of the chunk that wrote the value,
    the value is one more root with that gradient (see `MicrobatchState.carried`). Memory is kept for as long as a
    backward may ask for it, or only until the next chunk has read it when there is no backward.
    """

    def __init__(self) -> None:
        self._written: dict[int, Tensor] = {}
        self._read: dict[int, Tensor] = {}
        self._newest = -1

    def read(self, chunk: int) -> Tensor | None:
        """What the chunk before left, or None for the first; the same tensor again when the chunk is run again."""
        if chunk not in self._read and chunk - 1 in self._written:
            value = self._written[chunk - 1]
            self._read[chunk] = value.detach().requires_grad_(value.requires_grad)
        return self._read.get(chunk)

    def write(self, chunk: int, value: Tensor) -> None:
        """Leave a value for the next chunk. Only a chunk's first run counts: a recomputation has another graph."""
        if chunk <= self._newest:
            return
        self._newest = chunk
        self._written[chunk] = value
        if not torch.is_grad_enabled():
            self._written.pop(chunk - 1, None)
            self._read.pop(chunk - 1, None)

    def take(self, chunk: int) -> tuple[Tensor, Tensor] | None:
        """The value the chunk wrote and the gradient that the next chunk left for it, if any; forgotten after that."""
        value, reader = self._written.pop(chunk, None), self._read.pop(chunk + 1, None)
        if value is None or reader is None or reader.grad is None:
            return None
        return value, reader.grad
