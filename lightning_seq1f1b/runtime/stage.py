"""What the executor asks of a stage: run one chunk forward, and own the state its microbatch carries along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from lightning_seq1f1b.runtime.batching import Chunk, Microbatch
from lightning_seq1f1b.runtime.linear_layers import LinearLayer
from lightning_seq1f1b.runtime.objective import Objective


class MicrobatchState(Protocol):
    """What a microbatch leaves on a stage from chunk to chunk: keys and values, their gradients, recurrent states."""

    def carried(self, chunk: int, scale: Tensor | None = None) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Values that `chunk` handed to later chunks through autograd, and the gradients those chunks left for them.

        Keys and values need no entry here: their gradients travel inside the KV buffer. Recurrent states do. Called
        right before the backward of `chunk`; the tensors are extra roots of that one autograd call. Gradients that do
        not come from later chunks are multiplied by `scale`, see `seed`.
        """
        ...

    def seed(self, chunk: int, scale: Tensor | None = None) -> Tensor | None:
        """On the last stage, the gradient that the backward of what `chunk` returned starts from; None for 1.

        Called as a part of that backward, which so may compute the loss first.

        Args:
            chunk: the chunk.
            scale: 0-d, by which all gradients are multiplied before they are rounded to low precision; None for 1.
        """
        ...

    def result(self) -> Mapping[str, Tensor]:
        """On the last stage, what the microbatch gives, without autograd: its "loss", 0-d, and whatever else is asked.

        Called once, right before `close`.
        """
        ...

    def close(self) -> None:
        """Free every buffer. Called right after the backward of chunk 0, or after the last chunk's forward-only run."""
        ...


class Stage(Protocol):
    """Consecutive layers of a model, as the executor sees them."""

    @property
    def index(self) -> int:
        """Position among the stages, 0 first."""
        ...

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole model."""
        ...

    @property
    def linears(self) -> Sequence[LinearLayer]:
        """Its linear layers whose weight gradients may come later than all others; may be empty."""
        ...

    @property
    def trains(self) -> bool:
        """Whether any of its parameters wants a gradient now."""
        ...

    def open(self, microbatch: Microbatch, *, training: bool, objective: Objective | None = None) -> MicrobatchState:
        """Make the state of a microbatch; called before its chunk 0.

        Args:
            microbatch: the microbatch.
            training: whether the step trains; a stage before the first trained one takes part without gradients.
            objective: what is asked of it; None for the model's own loss.
        """
        ...

    def forward(self, chunk: Chunk, hidden: Tensor | None, state: MicrobatchState) -> Tensor:
        """Run one chunk.

        Args:
            chunk: the chunk's tokens, positions, mask and shifted labels.
            hidden: output of the previous stage, [rows, tokens, hidden size]; None on the first stage.
            state: what `open` made for the chunk's microbatch.

        Returns:
            The hidden states for the next stage, [rows, tokens, hidden size]; on the last stage what the chunk's
            backward starts from, usually its loss: the sum of its tokens' losses divided by `chunk.loss_denominator`.
        """
        ...
