"""A cut Hugging Face model that runs one of its stages at a time, on one chunk, through its own forward."""

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
from lightning_seq1f1b.models.stubs import Leaving
from lightning_seq1f1b.runtime.batching import Chunk, Microbatch


class StagedModel:
    """What the stages of one model on one rank share: the model, and everything that is set up on it once.

    The model's own forward runs, from its embeddings to its loss. On later stages the received hidden states replace
    the input of the stage's first layer; on all but the last, the forward ends behind the stage's last one.

    Args:
        split: the cut model.
    """

    def __init__(self, split: Split) -> None:
        model, layers = split.model, split.trunk.layers
        model.set_attn_implementation(split.probe.attention)
        silence_padding_check(model)
        self.split = split
        self._kinds = layer_kinds(model.config)
        self._cache_name = cache_argument(model) or "cache"
        self._forward = original_forward(model)
        self._recomputation = Recomputation(
            model, [layers[layer] for index in split.indices for layer in split.layer_ranges[index]]
        )
        self._row_end = RowEnd(model)
        self._received: Tensor | None = None
        self._running = False
        if split.num_stages > 1:
            split.trunk.module.register_forward_pre_hook(self._check_whole, prepend=True)
        for index in split.indices:
            if index > 0:
                first = layers[split.layer_ranges[index].start]
                first.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)

    @property
    def model(self) -> PreTrainedModel:
        """The cut model."""
        return self.split.model

    def open(self, microbatch: Microbatch, *, training: bool) -> ChunkedState:
        """Make the state of a microbatch on one stage; called before its chunk 0."""
        if training:
            self._recomputation.take_over()
        last_position = microbatch.last_position if self._row_end.wanted else None
        return ChunkedState(self._kinds, microbatch.length, last_position)

    def run(self, index: int, chunk: Chunk, hidden: Tensor | None, state: ChunkedState) -> Tensor:
        """Run one stage on one chunk; see `runtime.stage.Stage.forward`.

        Raises:
            ValueError: on the last stage, when the batch has no labels.
        """
        arguments: dict[str, Any] = {
            "position_ids": chunk.position_ids,
            "attention_mask": chunk.attention_mask,
            "use_cache": True,
            self._cache_name: state.chunk(chunk.unit.chunk, chunk.span),
        }
        if index == 0:
            arguments["input_ids"] = chunk.input_ids
        else:
            assert hidden is not None, "a later stage runs on what it received"
            # What embeddings, dropout or scaling of the first stage make of it is thrown away.
            arguments["inputs_embeds"] = hidden.detach().clone()
        if index == self.split.num_stages - 1:
            if chunk.labels is None:
                raise ValueError("a batch without labels has no loss; add labels to the batch")
            arguments["labels"] = arguments["shift_labels"] = chunk.labels
            arguments["num_items_in_batch"] = chunk.loss_denominator
        self._received, self._running = hidden, True
        self._row_end.position = state.last_position
        try:
            with self.split.only(index):
                output = self._forward(**arguments)
        except Leaving as leaving:
            return leaving.hidden
        finally:
            self._received = self._row_end.position = None
            self._running = False
        assert index == self.split.num_stages - 1, "the forward ended without running the stage's last layer"
        state.add_loss(output.loss)
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
