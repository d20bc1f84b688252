"""Keys and values of one microbatch on one layer: written once in place, read as a prefix, freed after chunk 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_seq1f1b.ops import library
from lightning_seq1f1b.ops.layout import unit_stride
from lightning_seq1f1b.ops.once import refuse_second_derivatives


class KVBuffer:
    """Sequence buffers of one layer for one microbatch, with the gradients that later chunks leave in them.

    The buffers are allocated at the first append for the whole row, from the shapes that arrive: [rows, KV heads,
    length, head size] for keys and values, which may differ in everything but the sequence dimension, the second from
    the end. GQA heads are not expanded. Gradient accumulators are float32 at least, and exist only once a chunk has
    left a gradient.

    Chunks are appended in their order, and their backwards run last chunk first; chunk 0's frees everything.

    With a window, what it does not reach is dropped: without autograd only keys and values from the last chunk's
    `lowest` on are held, and of the accumulators never more than the part that the next backward adds to or takes.

    Args:
        length: tokens of a whole row.
        window: tokens that a query of the layer looks back on, its own included; None for all.
    """

    def __init__(self, length: int, window: int | None = None) -> None:
        self.length = length
        self.window = window
        self._dropping = False  # whether keys and values that no later chunk reads are let go
        self._values: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}
        self._filled = 0
        self._awaited = 0  # where the next chunk to run its backward ends
        self._lowest = 0  # where the accumulators start in that backward
        self._closed = False
        self._wanting = False  # whether its chunks want gradients
        self._adding: int | None = None  # the backward in which attention has added to the accumulators

    def append(self, start: int, lowest: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Write a chunk at `start` and return everything from token `lowest` to the chunk's end, without a copy.

        The results carry autograd: backward adds the gradient of earlier chunks' part to the accumulators, and gives
        the chunk's own part, completed by what later chunks have left, to `tensors`. An attention that has put its
        gradients into the accumulators itself (see `appended`) hands none to the results.

        A chunk that autograd runs again, to recompute its activations, gets the same results.

        Args:
            start: first token of the chunk.
            lowest: first token to return; above 0 for layers with a sliding window.
            tensors: what to write, [rows, tokens, size] or [rows, heads, tokens, size], as many as in earlier chunks;
                usually keys, values.

        Raises:
            ValueError: a chunk that was appended before or whose turn has not come, that does not fit into the row,
                or that differs from earlier chunks in more than its length.
            RuntimeError: the buffer was freed.
        """
        if self._closed:
            raise RuntimeError("this KV buffer was freed, which happens after the backward of chunk 0")
        shapes = [list(tensor.shape) for tensor in tensors]
        if not shapes or any(len(shape) not in (3, 4) or shape[-2] != shapes[0][-2] for shape in shapes):
            raise ValueError(f"a chunk is [..., tokens, size] of three or four axes and equal tokens, not {shapes}")
        stop = start + shapes[0][-2]
        if not 0 <= lowest <= start < stop <= self.length:
            raise ValueError(
                f"a chunk of tokens [{start}, {stop}), read from token {lowest}, does not fit a row of {self.length}"
            )
        recomputed = stop <= self._filled and _in_backward()
        if not recomputed and start != self._filled:
            raise ValueError(
                f"chunks are appended once and in order: expected one that starts at token {self._filled}, "
                f"not one of tokens [{start}, {stop})"
            )
        if not recomputed:
            self._check(tensors, stop - start)
            if start == 0:
                self._dropping = self.window is not None and not torch.is_grad_enabled()
        place = Place(self, start, lowest, stop)
        # torch does not annotate `apply`.
        return _Append.apply(place, not recomputed, *tensors)  # type: ignore[no-untyped-call, no-any-return]

    def close(self) -> None:
        """Free buffers and accumulators."""
        self._closed = True
        self._values.clear()
        self._gradients.clear()

    def nbytes(self) -> int:
        """Bytes held now, buffers and accumulators."""
        return sum(tensor.nbytes for table in (self._values, self._gradients) for tensor in table.values())

    def _check(self, tensors: tuple[Tensor, ...], tokens: int) -> None:
        wanting = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if self._filled == 0:
            self._wanting = wanting
            return
        if len(tensors) != len(self._values):
            raise ValueError(f"earlier chunks call for {len(self._values)} tensors, not {len(tensors)}")
        for values, tensor in zip(self._values.values(), tensors, strict=True):
            wanted = [*values.shape[:-2], tokens, values.shape[-1]]
            if list(tensor.shape) != wanted or tensor.dtype != values.dtype or tensor.device != values.device:
                raise ValueError(
                    f"earlier chunks call for {wanted} {values.dtype} on {values.device}, "
                    f"not {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
                )
        if wanting != self._wanting:
            earlier, this = ("do", "does not") if self._wanting else ("do not", "does")
            raise ValueError(f"all chunks want gradients or none does: earlier ones {earlier}, this one {this}")

    def _write(self, slot: int, start: int, lowest: int, tensor: Tensor) -> None:
        if self._dropping:
            before = self._values.get(slot)
            parts = [] if before is None else [before.narrow(-2, before.shape[-2] - start + lowest, start - lowest)]
            with torch.inference_mode(False):
                self._values[slot] = torch.cat([*parts, tensor], dim=-2)
            return
        if slot not in self._values:
            shape = list(tensor.shape)
            shape[-2] = self.length
            # Outside inference mode, so that a buffer never becomes an inference tensor that autograd refuses to save.
            with torch.inference_mode(False):
                self._values[slot] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        library.append(_four(self._values[slot]), _four(unit_stride(tensor)), start)

    def _accumulator(self, slot: int) -> Tensor:
        """Of the tokens from `_lowest` on: all of the row, or where there is a window those that the chunk reads."""
        earlier = self._gradients.get(slot)
        tokens = self.length if self.window is None else self._awaited - self._lowest
        if earlier is None or earlier.shape[-2] != tokens:
            values = self._values[slot]
            shape = [*values.shape[:-2], tokens, values.shape[-1]]
            dtype = torch.promote_types(values.dtype, torch.float32)
            self._gradients[slot] = torch.zeros(shape, dtype=dtype, device=values.device)
            if earlier is not None:  # what later chunks have left ends where this chunk does
                self._gradients[slot].narrow(-2, tokens - earlier.shape[-2], earlier.shape[-2]).copy_(earlier)
        return self._gradients[slot]

    def _end_turn(self, place: Place) -> None:
        self._awaited, self._adding = place.start, None
        if place.start == 0:
            self.close()
        elif self.window is not None:
            for slot, gradients in self._gradients.items():
                self._gradients[slot] = gradients.narrow(-2, 0, place.start - place.lowest).clone()

    def _check_turn(self, start: int, stop: int, lowest: int) -> None:
        if self._closed:
            raise RuntimeError(
                f"the backward of the chunk of tokens [{start}, {stop}) came after its KV buffer was freed"
            )
        if stop != self._awaited:
            raise RuntimeError(
                "chunks run their backwards once and last chunk first: expected the one that ends at token "
                f"{self._awaited}, not that of tokens [{start}, {stop})"
            )
        self._lowest = 0 if self.window is None else lowest

    def _check_nothing_left(self) -> None:
        this = torch._C._current_graph_task_id()
        if self._adding not in (None, this):
            raise RuntimeError(
                "an earlier backward ran attention but stopped before the keys and values it attends to, as "
                "torch.autograd.grad of the query's weights does; what it added to their gradients cannot be taken back"
            )
        self._adding = this


@dataclass(frozen=True, eq=False)
class Place:
    """Where in a buffer the tokens [lowest, stop) lie that `append` returned; the chunk's own begin at `start`.

    Implements `ops.attend.Accumulators`.
    """

    buffer: KVBuffer
    start: int
    lowest: int
    stop: int

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Accumulators of the tokens [lowest, stop), of keys and of values; float32 at least, to be added to.

        Raises:
            RuntimeError: it is not this chunk's turn to run its backward, or the buffer was freed.
        """
        self.buffer._check_turn(self.start, self.stop, self.lowest)
        self.buffer._check_nothing_left()
        key, value = (
            self.buffer._accumulator(slot).narrow(-2, self.lowest - self.buffer._lowest, self.stop - self.lowest)
            for slot in (0, 1)
        )
        return key, value


def appended(key: Tensor, value: Tensor) -> Place | None:
    """The place of keys and values in a buffer; None unless they are just what one append returned, with autograd."""
    node = key.grad_fn
    if node is None or node is not value.grad_fn or (key.output_nr, value.output_nr) != (0, 1):
        return None
    place = getattr(node, "place", None)
    return place if isinstance(place, Place) else None


class _Append(torch.autograd.Function):
    """Autograd's view of `KVBuffer.append`: (new keys, new values) -> (keys so far, values so far)."""

    @staticmethod
    def forward(ctx: Any, place: Place, write: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.place, ctx.dtypes = place, [tensor.dtype for tensor in tensors]
        buffer = place.buffer
        if write:
            for slot, tensor in enumerate(tensors):
                buffer._write(slot, place.start, place.lowest, tensor)
            buffer._filled = buffer._awaited = place.stop
        if buffer._dropping:
            return tuple(buffer._values[slot].data for slot in range(len(tensors)))
        # `.data` has a version counter of its own: later chunks may write behind what autograd saves of this view.
        return tuple(
            buffer._values[slot].data.narrow(-2, place.lowest, place.stop - place.lowest)
            for slot in range(len(tensors))
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        place = ctx.place
        buffer, before, tokens = place.buffer, place.start - place.lowest, place.stop - place.start
        refuse_second_derivatives("a KV buffer")
        buffer._check_turn(place.start, place.stop, place.lowest)
        own: list[Tensor | None] = []
        for slot, gradient in enumerate(gradients):
            if gradient is not None and before > 0:
                reached = buffer._accumulator(slot).narrow(-2, place.lowest - buffer._lowest, before)
                reached.add_(gradient.narrow(-2, 0, before))
            part = None if gradient is None else gradient.narrow(-2, before, tokens)
            if slot in buffer._gradients:
                buffer._accumulator(slot)  # reaches back to this chunk's lowest token
                collected = buffer._gradients[slot].narrow(-2, place.start - buffer._lowest, tokens)
                part = (collected if part is None else collected + part).to(ctx.dtypes[slot])
            own.append(part)
        buffer._end_turn(place)
        return None, None, *own


def _four(tensor: Tensor) -> Tensor:
    """Three-dimensional values, as of an indexer, seen with one head."""
    return tensor if tensor.ndim == 4 else tensor[:, None]


def _in_backward() -> bool:
    """Whether autograd runs a backward in this thread: then a chunk's forward is run for its activations only."""
    return bool(torch._C._current_graph_task_id() != -1)
