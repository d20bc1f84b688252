"""Keys and values of one microbatch on one layer: written once in place, read as a prefix, freed after chunk 0."""

from __future__ import annotations

import torch
from torch import Tensor


class KVBuffer:
    """Sequence buffers of one layer for one microbatch, with the gradients that later chunks leave in them.

    The buffers are allocated at the first append for the whole row, from the shapes that arrive: [rows, KV heads,
    length, head size] for keys and values, which may differ in everything but the sequence dimension, the second from
    the end. GQA heads are not expanded. Gradient accumulators are float32 at least, and exist only once a later chunk
    has left a gradient.

    Args:
        length: tokens of a whole row.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._values: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}

    def append(self, start: int, lowest: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Write a chunk at `start` and return everything from token `lowest` to the chunk's end, without a copy.

        Writing the same chunk again (recomputation) is harmless. The results carry autograd: backward adds the
        gradient of earlier chunks' part to the accumulators, and gives the chunk's own part, completed by what later
        chunks have left, to `tensors`. So the chunks' backwards must run last chunk first.

        Args:
            start: first token of the chunk.
            lowest: first token to return; above 0 for layers with a sliding window.
            tensors: what to write, each [rows, heads, tokens, size]; usually keys, values.
        """
        return _Append.apply(self, start, lowest, *tensors)  # type: ignore[no-untyped-call, no-any-return]

    def close(self) -> None:
        """Free buffers and accumulators."""
        self._values.clear()
        self._gradients.clear()

    def nbytes(self) -> int:
        """Bytes held now, buffers and accumulators."""
        return sum(tensor.nbytes for table in (self._values, self._gradients) for tensor in table.values())

    def _write(self, slot: int, start: int, tensor: Tensor) -> Tensor:
        if slot not in self._values:
            shape = list(tensor.shape)
            shape[-2] = self.length
            # Outside inference mode, so that a buffer never becomes an inference tensor that autograd refuses to save.
            with torch.inference_mode(False):
                self._values[slot] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        values = self._values[slot]
        values.narrow(-2, start, tensor.shape[-2]).copy_(tensor)
        return values

    def _accumulate(self, slot: int, lowest: int, gradient: Tensor) -> None:
        if slot not in self._gradients:
            values = self._values[slot]
            dtype = torch.promote_types(values.dtype, torch.float32)
            self._gradients[slot] = torch.zeros(values.shape, dtype=dtype, device=values.device)
        self._gradients[slot].narrow(-2, lowest, gradient.shape[-2]).add_(gradient)

    def _left_by_later_chunks(self, slot: int, start: int, tokens: int) -> Tensor | None:
        gradients = self._gradients.get(slot)
        return None if gradients is None else gradients.narrow(-2, start, tokens)


class _Append(torch.autograd.Function):
    """Autograd's view of `KVBuffer.append`: (new keys, new values) -> (keys so far, values so far)."""

    @staticmethod
    def forward(ctx, buffer: KVBuffer, start: int, lowest: int, *tensors: Tensor):  # type: ignore[no-untyped-def]
        ctx.buffer, ctx.start, ctx.lowest = buffer, start, lowest
        ctx.tokens, ctx.dtypes = tensors[0].shape[-2], [tensor.dtype for tensor in tensors]
        stop = start + ctx.tokens
        # `.data` has a version counter of its own: later chunks may write behind what autograd saves of this view.
        return tuple(
            buffer._write(slot, start, tensor).data.narrow(-2, lowest, stop - lowest)
            for slot, tensor in enumerate(tensors)
        )

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):  # type: ignore[no-untyped-def]
        own: list[Tensor | None] = []
        before = ctx.start - ctx.lowest
        for slot, gradient in enumerate(gradients):
            later = ctx.buffer._left_by_later_chunks(slot, ctx.start, ctx.tokens)
            if gradient is not None and before > 0:
                ctx.buffer._accumulate(slot, ctx.lowest, gradient.narrow(-2, 0, before))
            part = None if gradient is None else gradient.narrow(-2, before, ctx.tokens)
            if later is not None:
                part = (later if part is None else later + part).to(ctx.dtypes[slot])
            own.append(part)
        return None, None, None, *own
