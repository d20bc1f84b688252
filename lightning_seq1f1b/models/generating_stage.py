"""A stage that runs rows further from where they stand, and gives logits in place of a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_seq1f1b.models.growing_cache import GenerationCache, RowsCache
from lightning_seq1f1b.models.stage import HuggingFaceStage
from lightning_seq1f1b.runtime.batching import Chunk, Microbatch
from lightning_seq1f1b.runtime.linear_layers import LinearLayer
from lightning_seq1f1b.runtime.stage import MicrobatchState


class GrowingState:
    """A microbatch's rows on one stage, during one run; implements `runtime.stage.MicrobatchState`.

    Args:
        cache: of the rows; it outlives the state.
        last_position: 0-d, the largest position of the run.
    """

    def __init__(self, cache: RowsCache, last_position: Tensor) -> None:
        self.cache, self.last_position = cache, last_position
        self.logits: Tensor | None = None

    def carried(self, chunk: int, scale: Tensor | None = None) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Nothing: there is no backward."""
        return (), ()

    def seed(self, chunk: int, scale: Tensor | None = None) -> Tensor | None:
        """None: there is no backward."""
        return None

    def result(self) -> Mapping[str, Tensor]:
        """The logits of the last token, [rows, 1, vocabulary]."""
        assert self.logits is not None, "asked on the last stage, after its last chunk"
        return {"logits": self.logits}

    def close(self) -> None:
        """Nothing to free: the cache goes on to the next token."""


class GeneratingStage:
    """Implements `runtime.stage.Stage` for generation.

    Args:
        stage: whose layers run.
        cache: where its keys, values and states are.
    """

    def __init__(self, stage: HuggingFaceStage, cache: GenerationCache) -> None:
        self._stage, self._cache = stage, cache

    @property
    def index(self) -> int:
        """Position among the stages, 0 first."""
        return self._stage.index

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole model."""
        return self._stage.num_stages

    @property
    def linears(self) -> Sequence[LinearLayer]:
        """None: there are no weight gradients."""
        return ()

    @property
    def trains(self) -> bool:
        """Nothing does: generation runs forwards alone."""
        return False

    def open(self, microbatch: Microbatch, **kwargs: Any) -> GrowingState:
        """Take up the state of a microbatch where the run before has left it."""
        return GrowingState(self._cache.of(microbatch.index), microbatch.last_position)

    def forward(self, chunk: Chunk, hidden: Tensor | None, state: MicrobatchState) -> Tensor:
        """Run one chunk.

        Returns:
            Hidden states, [rows, tokens, hidden size]; on the last stage the logits of the chunk's last token, [rows,
            1, vocabulary].
        """
        assert isinstance(state, GrowingState), "the state that open made"
        state.cache.start = chunk.span.start
        arguments: dict[str, Any] = {"position_ids": chunk.position_ids, "attention_mask": chunk.attention_mask}
        if self.index == self.num_stages - 1:
            arguments["logits_to_keep"] = 1
        if self._stage.staged.routers is not None:
            # Their loss is for training, and counts the tokens of whole rows.
            arguments["output_router_logits"] = False
        tokens = chunk.input_ids if self.index == 0 else hidden
        output = self._stage.staged.through(self.index, tokens, state.cache, state.last_position, **arguments)
        if self.index < self.num_stages - 1:
            return output
        state.logits = output.logits[:, -1:]
        return state.logits
