"""A cut Hugging Face model that runs one of its stages at a time, on one chunk, through its own forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from lightning_seq1f1b.models.attention import documents
from lightning_seq1f1b.models.chunk_cache import ChunkedState, layer_kinds
from lightning_seq1f1b.models.facade import original_forward
from lightning_seq1f1b.models.padding_check import silence_padding_check
from lightning_seq1f1b.models.recompute import Recomputation
from lightning_seq1f1b.models.requirements import cache_argument
from lightning_seq1f1b.models.rotary import RowEnd
from lightning_seq1f1b.models.router_loss import RouterLoss, Routers
from lightning_seq1f1b.models.sliced_head import SlicedHead, can_slice, hidden_states
from lightning_seq1f1b.models.split import Split
from lightning_seq1f1b.models.stubs import Leaving
from lightning_seq1f1b.models.tallied_state import TalliedState
from lightning_seq1f1b.runtime.batching import Chunk, Microbatch
from lightning_seq1f1b.runtime.objective import Objective

_OF_TRUNK = ("position_ids", "attention_mask")
"""Arguments of a model's forward that do not count behind its trunk."""


class StagedModel:
    """What the stages of one model on one rank share: the model, and everything that is set up on it once.

    The model's own forward runs, from its embeddings to its loss. On later stages the received hidden states replace
    the input of the stage's first layer; on all but the last, the forward ends behind the stage's last one.

    Args:
        split: the cut model.
        slices_logits: whether the last stage computes the logits of large chunks slice by slice.
    """

    def __init__(self, split: Split, *, slices_logits: bool) -> None:
        model, layers = split.model, split.trunk.layers
        model.set_attn_implementation(split.probe.attention)
        silence_padding_check(model)
        self.split = split
        self._kinds = layer_kinds(model.config)
        self._cache_name = cache_argument(model) or "cache"
        self._forward = original_forward(model)
        self._head = SlicedHead(split, self._forward, enabled=slices_logits)
        self._recomputation = Recomputation(
            model, [layers[layer] for index in split.indices for layer in split.layer_ranges[index]]
        )
        self._row_end = RowEnd(model)
        router_loss = RouterLoss.of(model)
        self.routers = None if router_loss is None else Routers(model, router_loss)
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

    def open(self, microbatch: Microbatch, *, training: bool, objective: Objective | None = None) -> ChunkedState:
        """Make the state of a microbatch on one stage; called before its chunk 0."""
        if training:
            self._recomputation.take_over()
        last_position = microbatch.last_position if self._row_end.wanted else None
        if objective is None:
            return ChunkedState(self._kinds, microbatch.length, last_position)
        own_loss = objective.own_loss and microbatch.chunks[0].labels is not None
        return TalliedState(objective.open(microbatch), own_loss, self._kinds, microbatch.length, last_position)

    def run(self, index: int, chunk: Chunk, hidden: Tensor | None, state: ChunkedState) -> Tensor:
        """Run one stage on one chunk; see `runtime.stage.Stage.forward`.

        Raises:
            ValueError: on the last stage, when the batch has no labels.
        """
        if self.routers is None or not state.own_loss:
            return self._run(index, chunk, hidden, state)
        with self.routers.watching(index, chunk.unit.chunk, chunk.real, begins=index == self.split.indices[0]):
            output = self._run(index, chunk, hidden, state)
        state.further_roots = partial(self.routers.take, index)
        if index == self.split.indices[-1] and chunk.span.stop == chunk.length:
            self.routers.complete()
            if index == self.split.num_stages - 1:
                state.add_loss(self.routers.value())
        return output

    def _run(self, index: int, chunk: Chunk, hidden: Tensor | None, state: ChunkedState) -> Tensor:
        arguments: dict[str, Any] = {
            "position_ids": chunk.position_ids,
            "attention_mask": chunk.attention_mask,
        }
        if self.routers is not None:
            arguments["output_router_logits"] = False  # the model would make a loss of what this stage sees
        if index == self.split.num_stages - 1 and state.own_loss:
            if chunk.labels is None:
                raise ValueError("a batch without labels has no loss; add labels to the batch")
            arguments["labels"] = arguments["shift_labels"] = chunk.labels
            arguments["num_items_in_batch"] = chunk.loss_denominator
        tokens = hidden if index > 0 else chunk.input_ids
        cache = state.chunk(chunk.unit.chunk, chunk.span)
        tally = state.tally if isinstance(state, TalliedState) else None
        asks_head = index == self.split.num_stages - 1 and tally is None
        head = self._head if asks_head and self._head.takes(*chunk.input_ids.shape) else None
        forward = self._forward if head is None else head.run_trunk
        with documents(chunk.first_key):
            output = self.through(index, tokens, cache, state.last_position, forward, **arguments)
        if index < self.split.num_stages - 1:
            return output
        if tally is not None:
            if state.own_loss:
                state.add_loss(output.loss)
            return tally.add(chunk, output.logits)
        if head is not None:
            behind = {name: value for name, value in arguments.items() if name not in _OF_TRUNK}
            return self._run_head(head, chunk, output, behind, state)
        state.add_loss(output.loss)
        return output.loss

    def _run_head(
        self, head: SlicedHead, chunk: Chunk, trunk_output: Any, arguments: dict[str, Any], state: ChunkedState
    ) -> Tensor:
        """The loss of a chunk whose trunk has run; with gradients it is put off until the chunk's backward.

        So no gradient waits for that, and the first backward, which waits for all forwards of its row, does not wait
        for the head's backwards too.
        """
        if not can_slice(trunk_output, *chunk.input_ids.shape):
            loss = head.whole_loss(trunk_output, arguments)
        elif torch.is_grad_enabled():
            state.put_off(chunk.unit.chunk, partial(head.loss_and_gradient, trunk_output, arguments))
            return hidden_states(trunk_output)
        else:
            loss, _ = head.loss_and_gradient(trunk_output, arguments)
        state.add_loss(loss)
        return loss

    def through(
        self,
        index: int,
        tokens: Tensor | None,
        cache: Cache,
        last_position: Tensor | None,
        forward: Callable[..., Any] | None = None,
        **arguments: Any,
    ) -> Any:
        """Run the model's own forward through one stage.

        Args:
            index: the stage.
            tokens: on the first stage tokens, [rows, tokens]; on others hidden states, [rows, tokens, hidden size].
            cache: what the stage's layers read and write.
            last_position: see `rotary.RowEnd`.
            forward: what runs in place of the model's own forward; it must run the stage's layers.
            arguments: further ones of the model's forward.

        Returns:
            Hidden states, [rows, tokens, hidden size]; on the last stage what the model's forward returns.
        """
        assert tokens is not None, "a later stage runs on what it received"
        if index == 0:
            arguments["input_ids"] = tokens
        else:
            # What embeddings, dropout or scaling of the first stage make of it is thrown away.
            arguments["inputs_embeds"] = tokens.detach().clone()
        arguments |= {"use_cache": True, self._cache_name: cache}
        self._received, self._running = tokens, True
        self._row_end.position = last_position
        try:
            with self.split.only(index):
                output = (forward or self._forward)(**arguments)
        except Leaving as leaving:
            return leaving.hidden
        finally:
            self._received = self._row_end.position = None
            self._running = False
        assert index == self.split.num_stages - 1, "the forward ended without running the stage's last layer"
        return output

    def _check_whole(self, trunk: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._running:
            raise RuntimeError(
                "a model cut into pipeline stages runs as a whole only: call self.model(**batch), not one of its parts"
            )

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (self._received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._received}
