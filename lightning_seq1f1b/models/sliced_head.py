"""What a model has behind its trunk, head and loss, run over slices of a chunk so that few logits exist at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_seq1f1b.models.split import Split
from lightning_seq1f1b.models.stubs import Stub
from lightning_seq1f1b.runtime.linear_layers import linear_layers
from lightning_seq1f1b.runtime.split_backward import DeferredGradients, SplitBackward
from lightning_seq1f1b.schedule import logits


class SlicedHead:
    """Head and loss of a model by its own code, with forward and backward of one slice of tokens after the other.

    The trunk runs once, for the whole chunk; then the model's own forward runs for every slice with a stub in place of
    the trunk that gives the slice's part of what the trunk gave. So soft-caps, scales and whatever else a family does
    with its logits stay its own. The gradient of the trunk's output is put together from the slices'; those of
    parameters are added to `.grad`, also float32 sums. The loss must be a sum over tokens, as between chunks.

    Args:
        split: the cut model.
        forward: the model's own forward.
        enabled: whether it takes any chunk.
    """

    def __init__(self, split: Split, forward: Callable[..., Any], *, enabled: bool = True) -> None:
        self._forward = forward
        self._model, self._trunk = split.model, split.trunk.module
        self._vocab_size: int = split.model.config.get_text_config(decoder=True).vocab_size
        # A model that owns its layers itself has no trunk to put a stub for.
        self._enabled = enabled and split.trunk.name != ""
        parent, _, self._name = split.trunk.name.rpartition(".")
        self._parent = split.model.get_submodule(parent)
        self._exit = _TrunkExit(self._trunk)

    def takes(self, rows: int, length: int) -> bool:
        """Whether a chunk of so many tokens in so many rows is sliced.

        Not where its logits are few; nor where hooks of the user would see slices instead of chunks.
        """
        if not self._enabled or not logits.are_sliced(rows * length, self._vocab_size):
            return False
        hooked = any(
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
            for module in self._behind()
        )
        return not hooked and not any(
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in self._parameters()
        )

    def run_trunk(self, **arguments: Any) -> Any:
        """What the trunk gives, from the arguments of the model's forward."""
        with self._replaced(self._exit):
            try:
                self._forward(**arguments)
            except _TrunkLeft as left:
                return left.output
        raise AssertionError("the forward ended without running the trunk")

    def whole_loss(self, trunk_output: Any, arguments: Mapping[str, Any]) -> Tensor:
        """The loss of the whole chunk at once, with its autograd graph.

        Args:
            trunk_output: from `run_trunk`.
            arguments: of the model's forward that count behind the trunk.
        """
        return self._loss(trunk_output, hidden_states(trunk_output), arguments)

    def loss_and_gradient(
        self, trunk_output: Any, arguments: Mapping[str, Any], scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The chunk's loss, and the gradient of the trunk's hidden states; parameters get theirs where grad mode is on.

        Args:
            trunk_output: from `run_trunk`; `can_slice` says yes to it.
            arguments: of the model's forward that count behind the trunk: labels and so on. Tensors of [rows, length,
                ...] are sliced, all others are given as they are.
            scale: 0-d, a factor of all gradients; None for 1.

        Returns:
            The loss, 0-d, without autograd, float32 at least; and the gradient, [rows, length, hidden size], or None
            where none is wanted.
        """
        hidden = hidden_states(trunk_output)
        rows, length, _ = hidden.shape
        slice_bytes = logits.CPU_SLICE if hidden.device.type == "cpu" else logits.ACCELERATOR_SLICE
        step = logits.slice_length(length, rows, self._vocab_size, slice_bytes)
        wanted = hidden.requires_grad and torch.is_grad_enabled()
        gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format) if wanted else None
        total: Tensor | None = None
        now = DeferredGradients()
        behind = set(self._behind())
        split = SplitBackward([layer for layer in linear_layers(self._model, (Conv1D,)) if layer.module in behind])
        with split.deferring(now):
            for start in range(0, length, step):
                part = slice(start, start + step)
                leaf = hidden.detach()[:, part].contiguous().requires_grad_(wanted)
                loss = self._loss(_with_hidden(trunk_output, leaf), leaf, _sliced(arguments, part, hidden))
                if loss.requires_grad:
                    with torch.autocast(hidden.device.type, enabled=False):
                        torch.autograd.backward(loss, scale)
                    now.accumulate()
                if gradient is not None:
                    assert leaf.grad is not None
                    gradient[:, part] = leaf.grad
                loss = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
                total = loss if total is None else total + loss
        assert total is not None
        return total, gradient

    def _loss(self, trunk_output: Any, hidden: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        # In a function of its own, so that the output with its logits is gone before the backward.
        with self._replaced(_Given(self._trunk, trunk_output)):
            return self._forward(inputs_embeds=hidden, use_cache=False, **arguments).loss

    @contextmanager
    def _replaced(self, stub: Stub) -> Iterator[None]:
        self._parent._modules[self._name] = stub
        try:
            yield
        finally:
            self._parent._modules[self._name] = self._trunk

    def _behind(self) -> Iterator[nn.Module]:
        """The modules that may run behind the trunk: all but the model itself, the trunk and what is in it."""
        inside = set(self._trunk.modules())
        for module in self._model.modules():
            if module is not self._model and module not in inside:
                yield module

    def _parameters(self) -> Iterator[nn.Parameter]:
        for module in self._behind():
            yield from module.parameters(recurse=False)


def hidden_states(trunk_output: Any) -> Tensor:
    """The last hidden states in what a trunk gave, [rows, length, hidden size]."""
    return trunk_output[0]


def can_slice(trunk_output: Any, rows: int, length: int) -> bool:
    """Whether nothing of what a trunk gave but its hidden states, one for each token, leads back to parameters."""
    values = trunk_output.values() if isinstance(trunk_output, Mapping) else trunk_output
    first, *rest = values
    is_hidden = isinstance(first, Tensor) and first.ndim == 3 and first.shape[:2] == (rows, length)
    return is_hidden and not any(tensor.requires_grad for tensor in _tensors(rest))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _with_hidden(trunk_output: Any, hidden: Tensor) -> Any:
    if isinstance(trunk_output, Mapping):
        return type(trunk_output)(**{**trunk_output, next(iter(trunk_output)): hidden})
    return (hidden, *trunk_output[1:])


def _sliced(arguments: Mapping[str, Any], part: slice, hidden: Tensor) -> dict[str, Any]:
    return {
        name: value[:, part].contiguous()
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == hidden.shape[:2]
        else value
        for name, value in arguments.items()
    }


class _TrunkLeft(Exception):  # noqa: N818 (no error: the way out of a model's forward behind its trunk)
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class _TrunkExit(Stub):
    """In place of the trunk: runs it, and ends the model's forward behind it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _TrunkLeft(self.__dict__["original"](*args, **kwargs))


class _Given(Stub):
    """In place of the trunk: gives what it is told to."""

    def __init__(self, original: nn.Module, output: Any) -> None:
        super().__init__(original)
        self._output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._output
