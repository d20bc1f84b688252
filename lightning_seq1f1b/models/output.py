"""What a call of a cut model returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


class PipelineOutput(Mapping[str, Tensor]):
    """The loss of a batch, by attribute, by key or as first element, like an output of transformers.

    Args:
        loss: scalar; the same on every stage.
    """

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss

    def __getitem__(self, key: str | int) -> Tensor:
        if key in ("loss", 0):
            return self.loss
        raise KeyError(_only_loss(key))

    def __iter__(self) -> Iterator[str]:
        return iter(("loss",))

    def __len__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}(loss={self.loss!r})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_only_loss(name))


def _only_loss(name: str | int) -> str:
    return (
        f"the output of a model cut into pipeline stages has no {name!r}, only 'loss': logits and hidden states exist "
        "on one stage only, one chunk at a time"
    )
