"""What stands in for a module of another stage: it has no parameters, and keeps the model's own forward running."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Stub(nn.Module):
    """In place of `original`, which it hides from parameters and state dict, but whose plain attributes it answers.

    Models ask layers of other stages for attributes such as their attention type, so those must stay readable.
    """

    original: nn.Module

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # Past nn.Module's registration, so that the original is no submodule.
        object.__setattr__(self, "original", original)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "original" not in self.__dict__:  # while being unpickled
                raise
            return getattr(self.__dict__["original"], name)

    def extra_repr(self) -> str:
        """The class of the module it stands for."""
        return f"for {type(self.__dict__['original']).__name__} of another stage"


class Leaving(Exception):  # noqa: N818 (no error: the way out of a model's forward behind a stage's last layer)
    """Raised by an `ExitStub`.

    Attributes:
        hidden: what the last layer of the stage returned, [rows, tokens, hidden size].
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class LayerStub(Stub):
    """In place of a decoder layer: keeps the layers' indices, and returns its hidden states unchanged.

    Args:
        original: the layer of the other stage, without memory.
        outputs: None where the family's layers return a tensor, else the length of the tuple they return.
    """

    def __init__(self, original: nn.Module, outputs: int | None) -> None:
        super().__init__(original)
        self.outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hidden states, as the layer would return them: alone, or first in a tuple padded with None."""
        hidden = _hidden_states(args, kwargs)
        return hidden if self.outputs is None else (hidden, *[None] * (self.outputs - 1))


class ExitStub(Stub):
    """In place of the decoder layer behind a stage's last one: ends the model's forward there.

    It stands behind the last layer, so hooks that the user puts on that layer have run before.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises `Leaving` with the hidden states."""
        raise Leaving(_hidden_states(args, kwargs))


class PassStub(Stub):
    """In place of an embedding, norm or head: nobody uses its result, but code around it must find a fitting shape."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The first floating tensor of three dimensions among the arguments, else zero, which broadcasts."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.ndim == 3:
                return tensor
        return torch.zeros((), device=tensors[0].device if tensors else None)


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a decoder layer is given to work on."""
    return args[0] if args else kwargs["hidden_states"]
