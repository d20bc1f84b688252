"""Keys, values and recurrent states between the chunks of a microbatch, behind the cache protocol of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig

from lightning_seq1f1b.models.autocasting import autocasted
from lightning_seq1f1b.models.carry import Carry
from lightning_seq1f1b.runtime.kv_buffer import KVBuffer
from lightning_seq1f1b.runtime.summed_loss import SummedLoss
from lightning_seq1f1b.schedule.spans import Span


def layer_kinds(config: PreTrainedConfig) -> list[Any]:
    """For every layer of the model an empty cache layer of transformers, which tells its kind and its window."""
    return list(DynamicCache(config=config.get_text_config(decoder=True)).layers)


class ChunkedState(SummedLoss):
    """What one microbatch leaves on one stage from chunk to chunk; implements `runtime.stage.MicrobatchState`.

    Args:
        kinds: `layer_kinds` of the model.
        length: tokens of a whole row.
        last_position: 0-d, the largest position in the microbatch's rows; None where nothing depends on it.
    """

    own_loss = True
    """Whether the model's own loss is part of what the microbatch gives."""

    def __init__(self, kinds: Sequence[Any], length: int, last_position: Tensor | None = None) -> None:
        super().__init__()
        self.kinds = kinds
        self.length = length
        self.last_position = last_position
        self._buffers: dict[tuple[str, int], KVBuffer] = {}
        self._carries: dict[tuple[str, int, int], Carry] = {}
        self.further_roots: Callable[[int, Tensor | None], Iterable[tuple[Tensor, Tensor]]] = lambda chunk, scale: ()
        """Gives, for a chunk, more tensors that its backward starts from, with so many times their gradients."""

    def chunk(self, index: int, span: Span) -> ChunkCache:
        """The cache that a model is given for one chunk. Asking again gives an equal one."""
        return ChunkCache(self, index, span)

    def carried(self, chunk: int, scale: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Recurrent states that `chunk` handed on, with the gradients that came back, and `further_roots`."""
        taken = [pair for carry in self._carries.values() if (pair := carry.take(chunk)) is not None]
        taken += self.further_roots(chunk, scale)
        return [value for value, _ in taken], [gradient for _, gradient in taken]

    def close(self) -> None:
        """Free every buffer."""
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()
        self._carries.clear()

    def buffer(self, what: str, layer: int) -> KVBuffer:
        """The sequence buffer of a layer: its keys and values, or the keys of its indexer."""
        window = self.window(layer) if what == "attention" else None
        return self._buffers.setdefault((what, layer), KVBuffer(self.length, window))

    def carry(self, what: str, layer: int, index: int) -> Carry:
        """The recurrent value of a layer: its convolution's last inputs, or its state."""
        return self._carries.setdefault((what, layer, index), Carry())

    def window(self, layer: int) -> int | None:
        """Tokens that the layer's attention looks back on, its own included; None for all."""
        return getattr(self.kinds[layer], "sliding_window", None) if layer < len(self.kinds) else None


class ChunkCache(Cache):
    """The cache as the model sees it while it runs one chunk.

    Bound to the chunk's place, not to how often it was called: when activation recomputation runs the chunk again in
    its backward, it gives the same answers.
    """

    def __init__(self, state: ChunkedState, index: int, span: Span) -> None:
        super().__init__(layers=list(state.kinds))
        self._state = state
        self._index = index
        self._span = span

    def _lowest(self, layer_idx: int) -> int:
        window = self._state.window(layer_idx)
        return 0 if window is None else max(0, self._span.start - window + 1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the chunk's keys and values; returns those of the prefix, or of its window, and the chunk.

        Args:
            key_states: [rows, KV heads, tokens, size].
            value_states: [rows, KV heads, tokens, size]; sizes may differ.
            layer_idx: the layer's index in the whole model.
            args: ignored.
            kwargs: ignored.
        """
        # Attention casts under autocast in any case; before storing, it is done once, not once per later chunk.
        key_states, value_states = autocasted(key_states), autocasted(value_states)
        buffer = self._state.buffer("attention", layer_idx)
        keys, values = buffer.append(self._span.start, self._lowest(layer_idx), key_states, value_states)
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Keep the keys of a sparse attention's indexer, [rows, tokens, size]; returns all so far."""
        return self._state.buffer("indexer", layer_idx).append(self._span.start, 0, indexer_key_states)[0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the chunk."""
        return self._span.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the chunk's first token."""
        return self._span.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys `update` returns, and the position of the first."""
        lowest = self._lowest(layer_idx)
        return self._span.start + query_length - lowest, lowest

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a recurrent layer goes on from an earlier chunk."""
        return self._index > 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """Always: it keeps chunks of one token from being taken for generation, which updates states in place."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution from the chunk before, [rows, channels, kernel size]; None at first."""
        return self._state.carry("convolution", layer_idx, state_idx).read(self._index)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Keep a convolution's inputs, [rows, channels, tokens]; returns them behind those of the chunk before."""
        carry = self._state.carry("convolution", layer_idx, state_idx)
        before = carry.read(self._index)
        if conv_kernel_size is None:
            conv_kernel_size = conv_states.shape[-1] if before is None else before.shape[-1]
        if before is not None:
            conv_states = torch.cat([before, conv_states], dim=-1)
        elif conv_states.shape[-1] < conv_kernel_size:
            conv_states = F.pad(conv_states, (conv_kernel_size - conv_states.shape[-1], 0))
        carry.write(self._index, conv_states[..., -conv_kernel_size:])
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The recurrent state that the chunk before left; None at first."""
        return self._state.carry("recurrence", layer_idx, state_idx).read(self._index)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Keep the recurrent state at the chunk's end."""
        self._state.carry("recurrence", layer_idx, state_idx).write(self._index, recurrent_states)
        return recurrent_states

    @property
    def is_compileable(self) -> bool:
        """No: it writes into buffers that are shared between chunks."""
        return False
