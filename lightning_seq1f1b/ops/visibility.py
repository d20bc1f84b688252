"""Which keys a chunk's queries see: causal, and of that at most a window, a document, and no padding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Visibility:
    """Query i of a chunk stands at key `keys - queries + i`, its position, and sees key n when all of this holds.

    Attributes:
        window: n > position - window; None for no window.
        first_key: [rows, queries], int32: n >= first_key, so that a query sees its own document in a packed row only.
        key_mask: [rows, keys], bool: true at n, so that nobody sees padding.

    n <= position always. One object serves all layers of a forward, which then share one dense mask where a kernel
    needs it.
    """

    window: int | None = None
    first_key: Tensor | None = None
    key_mask: Tensor | None = None
    _dense: dict[tuple[int, int, torch.device], Tensor] = field(default_factory=dict, init=False, repr=False)

    def plain(self, keys: int) -> bool:
        """Whether a query sees every key up to its own position."""
        windowed = self.window is not None and self.window < keys
        return not windowed and self.first_key is None and self.key_mask is None

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """The same as a boolean mask, [rows or 1, 1, queries, keys], true where a query sees a key; made once."""
        at = (queries, keys, device)
        if at not in self._dense:
            self._dense[at] = self.part(queries, keys, 0, queries, device)
        return self._dense[at]

    def part(self, queries: int, keys: int, start: int, stop: int, device: torch.device) -> Tensor:
        """Of the dense mask the queries [start, stop)."""
        position = torch.arange(keys - queries + start, keys - queries + stop, device=device)[:, None]
        key = torch.arange(keys, device=device)
        mask = (key <= position)[None, None]
        if self.window is not None:
            mask = mask & (key > position - self.window)
        if self.first_key is not None:
            mask = mask & (key >= self.first_key[:, None, start:stop, None])
        if self.key_mask is not None:
            mask = mask & self.key_mask[:, None, None]
        return mask
