"""What a call of a cut model returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


class PipelineOutput(Mapping[str, Tensor]):
    """The loss of a batch, by attribute, by key or by place, like an output of transformers; the same on every stage.

    Args:
        loss: scalar; None when the batch has no labels, which only evaluation with logits allows.
        logits: [rows, length, vocabulary]; None where they were not asked for.
        metrics: what `chunked_loss` asked for beside the loss, 0-d.
    """

    def __init__(
        self, loss: Tensor | None, logits: Tensor | None = None, metrics: Mapping[str, Tensor] | None = None
    ) -> None:
        self.metrics = dict(metrics or {})
        self._entries = {name: value for name, value in (("loss", loss), ("logits", logits)) if value is not None}

    def __getitem__(self, key: str | int) -> Tensor:
        entries = list(self._entries.values()) if isinstance(key, int) else self._entries
        try:
            return entries[key]  # type: ignore[index]
        except (KeyError, IndexError):
            raise KeyError(self._missing(key)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        entries = ", ".join(f"{name}={value!r}" for name, value in self._entries.items())
        return f"{type(self).__name__}({entries})"

    def __getattr__(self, name: str) -> Any:
        entries = vars(self).get("_entries", {})
        if name in entries:
            return entries[name]
        if name == "loss" and "logits" in entries:
            return None
        raise AttributeError(self._missing(name))

    def _missing(self, name: str | int) -> str:
        entries = vars(self).get("_entries", {})
        return (
            f"the output of a model cut into pipeline stages has no {name!r}, only {' and '.join(map(repr, entries))}: "
            "logits and hidden states exist on one stage only, one chunk at a time. In evaluation, "
            "Seq1F1BStrategy(evaluation_logits=True) gathers the logits; for a loss of your own on them in training "
            "there is lightning_seq1f1b.chunked_loss"
        )
