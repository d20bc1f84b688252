"""Keys, values and recurrent states of rows that generation makes longer, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

from torch import LongTensor, Tensor
from transformers import DynamicCache, PreTrainedConfig


class RowsCache(DynamicCache):
    """What some rows leave on this rank's stages, in transformers' own cache layers; those of other stages stay empty.

    What is asked about the length of the rows is answered from `start`, whichever layers are here.

    Args:
        config: of the model.

    Attributes:
        start: tokens of the rows before the chunk that runs.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.start = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the chunk."""
        return self.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the chunk's first token."""
        return self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys `update` returns, and the position of the first."""
        window = getattr(self.layers[layer_idx], "sliding_window", None) if layer_idx < len(self.layers) else None
        lowest = 0 if window is None else max(0, self.start - window + 1)
        return self.start + query_length - lowest, lowest

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a recurrent layer goes on from an earlier chunk."""
        return self.start > 0

    @property
    def is_compileable(self) -> bool:
        """No: it grows."""
        return False


class GenerationCache(DynamicCache):
    """The cache that transformers' generation loop is given, and hands back: the rows of all microbatches.

    Args:
        config: of the model.
        together: neighbouring rows that may change places, as beams of one prompt do: they share a microbatch.
        microbatches: at most this many.

    Attributes:
        length: tokens that all rows have in it.
    """

    def __init__(self, config: PreTrainedConfig, together: int, microbatches: int) -> None:
        super().__init__(config=config)
        self.length = 0
        self._config, self._together, self._microbatches = config, together, microbatches
        self._bounds: list[int] = []
        self._caches: list[RowsCache] = []

    def open(self, rows: int) -> None:
        """Make room for rows; called before the first tokens.

        Args:
            rows: how many, a multiple of `together`.
        """
        groups = rows // self._together
        count = min(groups, self._microbatches)
        self._bounds = [index * groups // count * self._together for index in range(count + 1)]
        self._caches = [RowsCache(self._config) for _ in range(count)]

    def close(self) -> None:
        """Free everything."""
        self._caches.clear()
        self.length = 0

    @property
    def row_ranges(self) -> Sequence[tuple[int, int]]:
        """First row, and the one behind the last, of every microbatch."""
        return list(pairwise(self._bounds))

    def of(self, microbatch: int) -> RowsCache:
        """The cache of a microbatch's rows."""
        return self._caches[microbatch]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the rows have in the cache."""
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the next token."""
        return self.length

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether there are tokens in it."""
        return self.length > 0

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        """Put other rows in the places of rows.

        Args:
            beam_idx: [rows], int64: for every place the row that goes there, one of its own microbatch.
        """
        for cache, (first, last) in zip(self._caches, self.row_ranges, strict=True):
            cache.reorder_cache(cast("LongTensor", beam_idx[first:last] - first))

    @property
    def is_compileable(self) -> bool:
        """No: it grows."""
        return False

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Not for layers: they are given the cache of their microbatch."""
        raise RuntimeError("the cache of a model that is cut into pipeline stages serves self.model.generate alone")
