"""A cut Hugging Face model as the executor's stage: its own forward, run on one chunk at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_seq1f1b.models.chunk_cache import ChunkedState, layer_kinds
from lightning_seq1f1b.models.facade import original_forward
from lightning_seq1f1b.models.padding_check import silence_padding_check
from lightning_seq1f1b.models.recompute import Recomputation
from lightning_seq1f1b.models.requirements import cache_argument
from lightning_seq1f1b.models.rotary import RowEnd
from lightning_seq1f1b.models.split import Split
from lightning_seq1f1b.runtime.batching import Chunk, Microbatch
from lightning_seq1f1b.runtime.stage import MicrobatchState


class HuggingFaceStage:
    """Implements `runtime.stage.Stage` around a model that `models.split.cut` left one stage of.

    The model's own forward runs, from its embeddings to its loss. On later stages the received hidden states replace
    the input of the first layer that is left; on all but the last, the forward ends behind the last one.

    Args:
        split: the cut model.
    """

    def __init__(self, split: Split) -> None:
        model = split.model
        layers = [split.trunk.layers[index] for index in split.layers]
        model.set_attn_implementation(split.probe.attention)
        silence_padding_check(model)
        self._split = split
        self._kinds = layer_kinds(model.config)
        self._cache_name = cache_argument(model) or "cache"
        self._forward = original_forward(model)
        self._recomputation = Recomputation(model, layers)
        self._row_end = RowEnd(model)
        self._received: Tensor | None = None
        self._running = False
        if split.num_stages > 1:
            split.trunk.module.register_forward_pre_hook(self._check_whole, prepend=True)
        if not split.is_first:
            layers[0].register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        if not split.is_last:
            # In the stub behind it, not in a hook of the last layer: hooks that the user adds later still run before.
            split.trunk.layers[split.layers.stop].register_forward_pre_hook(self._leave, with_kwargs=True)

    @property
    def model(self) -> PreTrainedModel:
        """The cut model."""
        return self._split.model

    @property
    def layers(self) -> range:
        """Indices of its layers in the whole model."""
        return self._split.layers

    @property
    def index(self) -> int:
        """Position among the stages, 0 first."""
        return self._split.index

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole model."""
        return self._split.num_stages

    def open(self, microbatch: Microbatch, *, training: bool) -> ChunkedState:
        """Make the state of a microbatch; called before its chunk 0."""
        if training:
            self._recomputation.take_over()
        last_position = microbatch.last_position if self._row_end.wanted else None
        return ChunkedState(self._kinds, microbatch.length, last_position)

    def forward(self, chunk: Chunk, hidden: Tensor | None, state: MicrobatchState) -> Tensor:
        """Run one chunk; see `runtime.stage.Stage.forward`.

        Raises:
            ValueError: on the last stage, when the batch has no labels.
        """
        assert isinstance(state, ChunkedState), "the state that open made"
        arguments: dict[str, Any] = {
            "position_ids": chunk.position_ids,
            "attention_mask": chunk.attention_mask,
            "use_cache": True,
            self._cache_name: state.chunk(chunk.unit.chunk, chunk.span),
        }
        if self._split.is_first:
            arguments["input_ids"] = chunk.input_ids
        else:
            assert hidden is not None, "a later stage runs on what it received"
            # What embeddings, dropout or scaling of the first stage make of it is thrown away.
            arguments["inputs_embeds"] = hidden.detach().clone()
        if self._split.is_last:
            if chunk.labels is None:
                raise ValueError("a batch without labels has no loss; add labels to the batch")
            arguments["labels"] = arguments["shift_labels"] = chunk.labels
            arguments["num_items_in_batch"] = chunk.loss_denominator
        self._received, self._running = hidden, True
        self._row_end.position = state.last_position
        try:
            output = self._forward(**arguments)
        except _LastLayer as last:
            return last.hidden
        finally:
            self._received = self._row_end.position = None
            self._running = False
        assert self._split.is_last, "the forward ended without running the stage's last layer"
        return output.loss

    def _check_whole(self, trunk: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._running:
            raise RuntimeError(
                "a model cut into pipeline stages runs as a whole only: call self.model(**batch), not one of its parts"
            )

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (self._received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._received}

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _LastLayer(args[0] if args else kwargs["hidden_states"])


class _LastLayer(Exception):  # noqa: N818 (no error: the way out of the model's forward behind the stage's last layer)
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden
