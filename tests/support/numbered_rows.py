"""Rows that can be told apart in a batch, and a callback that writes down which ones a run has seen."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from support.training import Rows

FIRST_TOKEN = 3


class NumberedRows(Rows):
    """Random rows whose first token gives their number."""

    def __init__(self, count: int, length: int = 13) -> None:
        super().__init__(count, length=length, seed=5)
        self.ids[:, 0] = FIRST_TOKEN + torch.arange(count)


class AugmentedRows(NumberedRows):
    """Draws three tokens of a row anew each time, from every source of random numbers that datasets use."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        drawn = [int(torch.randint(3, 90, ())), random.randint(3, 90), int(np.random.randint(3, 90))]
        row["input_ids"] = row["input_ids"].clone()
        row["input_ids"][-3:] = torch.tensor(drawn)
        return row


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
