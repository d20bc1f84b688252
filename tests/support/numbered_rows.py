"""Rows that can be told apart in a batch, and a callback that writes down which ones a run has seen."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from support.training import Rows

FIRST_TOKEN = 3


class NumberedRows(Rows):
    """Random rows whose first token gives their number."""

    def __init__(self, count: int, length: int = 13) -> None:
        super().__init__(count, length=length, seed=5)
        self.ids[:, 0] = FIRST_TOKEN + torch.arange(count)


def numbers(batch: dict[str, torch.Tensor]) -> list[int]:
    """Which rows a batch holds."""
    return (batch["input_ids"][:, 0] - FIRST_TOKEN).tolist()


class SeenRows(Callback):
    """Remembers the rows of every batch, one list for each epoch."""

    def __init__(self) -> None:
        self.train: list[list[list[int]]] = []
        self.val: list[list[list[int]]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.train.append([])

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *args: Any) -> None:
        self.train[-1].append(numbers(batch))

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.val.append([])

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *args: Any
    ) -> None:
        self.val[-1].append(numbers(batch))
