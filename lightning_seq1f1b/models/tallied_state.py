"""The state of a microbatch of which something other than the model's own loss alone is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_seq1f1b.models.chunk_cache import ChunkedState
from lightning_seq1f1b.runtime.objective import Tally


class TalliedState(ChunkedState):
    """A `ChunkedState` whose result and seeds are those of a tally.

    Args:
        tally: of the microbatch; it is given the logits on the last stage.
        own_loss: whether the model's own loss is added to its result.
        kinds: see `ChunkedState`.
        length: see `ChunkedState`.
        last_position: see `ChunkedState`.
    """

    def __init__(
        self, tally: Tally, own_loss: bool, kinds: Sequence[Any], length: int, last_position: Tensor | None
    ) -> None:
        super().__init__(kinds, length, last_position)
        self.tally, self.own_loss = tally, own_loss

    def seed(self, chunk: int, scale: Tensor | None = None) -> Tensor | None:
        """The gradient of what the tally made of the chunk's logits, float32 at least."""
        gradient = self.tally.seed(chunk)
        return gradient if gradient is None or scale is None else gradient * scale

    def result(self) -> Mapping[str, Tensor]:
        """What the tally gives, and the model's own loss, 0-d, if it was asked for."""
        return {**super().result(), **self.tally.result()} if self.own_loss else self.tally.result()
