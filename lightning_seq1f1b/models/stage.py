"""The stages of a cut Hugging Face model as the executor sees them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightning_seq1f1b.models.chunk_cache import ChunkedState
from lightning_seq1f1b.models.router_loss import Routers
from lightning_seq1f1b.models.split import Split
from lightning_seq1f1b.models.staged_model import StagedModel
from lightning_seq1f1b.runtime.batching import Chunk, Microbatch
from lightning_seq1f1b.runtime.linear_layers import LinearLayer, linear_layers
from lightning_seq1f1b.runtime.objective import Objective
from lightning_seq1f1b.runtime.stage import MicrobatchState


def make_stages(split: Split, *, slices_logits: bool = True) -> dict[int, HuggingFaceStage]:
    """The stages that `models.split.cut` has left of a model, by their index; to be called once.

    Args:
        split: the cut model.
        slices_logits: whether the last stage computes the logits of large chunks slice by slice.
    """
    staged = StagedModel(split, slices_logits=slices_logits)
    return {index: HuggingFaceStage(staged, index) for index in split.indices}


class HuggingFaceStage:
    """Implements `runtime.stage.Stage`; see `make_stages`.

    Args:
        staged: the model, which other stages on this rank share.
        index: which of its stages this is.
    """

    def __init__(self, staged: StagedModel, index: int) -> None:
        self._staged, self._index = staged, index

    @property
    def model(self) -> PreTrainedModel:
        """The cut model, with all stages on this rank."""
        return self._staged.model

    @property
    def staged(self) -> StagedModel:
        """What it shares with the other stages on this rank."""
        return self._staged

    @property
    def layers(self) -> range:
        """Indices of its layers in the whole model."""
        return self._staged.split.layer_ranges[self._index]

    @property
    def index(self) -> int:
        """Position among the stages, 0 first."""
        return self._index

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole model."""
        return self._staged.split.num_stages

    @property
    def routers(self) -> Routers | None:
        """The routers of the model, where their auxiliary loss is part of its loss."""
        return self._staged.routers

    @property
    def linears(self) -> Sequence[LinearLayer]:
        """Its linear layers, for a split backward; not the head, whose output gradient is as large as the logits."""
        head = set(self.model.get_output_embeddings().modules())
        with self._staged.split.only(self._index):
            found = linear_layers(self.model, transposed=(Conv1D,))
        return [layer for layer in found if layer.module not in head]

    @property
    def trains(self) -> bool:
        """Whether any of its parameters wants a gradient now."""
        with self._staged.split.only(self._index):
            return any(parameter.requires_grad for parameter in self.model.parameters())

    def open(self, microbatch: Microbatch, *, training: bool, objective: Objective | None = None) -> ChunkedState:
        """Make the state of a microbatch; called before its chunk 0."""
        return self._staged.open(microbatch, training=training, objective=objective)

    def forward(self, chunk: Chunk, hidden: Tensor | None, state: MicrobatchState) -> Tensor:
        """Run one chunk; see `runtime.stage.Stage.forward`.

        Raises:
            ValueError: on the last stage, when the batch has no labels.
        """
        assert isinstance(state, ChunkedState), "the state that open made"
        return self._staged.run(self._index, chunk, hidden, state)
