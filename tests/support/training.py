"""An ordinary LightningModule and its data, trained by any strategy; the results are compared with one device's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from support.tiny_models import VOCAB_SIZE, tiny_model
from torch.utils.data import DataLoader, Dataset

from lightning_seq1f1b import Seq1F1BStrategy

LENGTH = 101


class Rows(Dataset):
    """Rows of random tokens, a third of the labels -100; right-padded ones have random lengths and a mask."""

    def __init__(self, count: int, *, padded: bool = False, seed: int = 0, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, VOCAB_SIZE, (count, length), generator=generator)
        ignored = torch.rand(self.ids.shape, generator=generator) < 1 / 3
        self.labels = self.ids.masked_fill(ignored, -100)
        self.mask = torch.ones_like(self.ids)
        if padded:
            lengths = torch.randint(length // 3, length + 1, (count, 1), generator=generator)
            self.mask = (torch.arange(length)[None] < lengths).long()
            self.ids, self.labels = self.ids * self.mask, self.labels.masked_fill(self.mask == 0, -100)
        self.padded = padded

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = {"input_ids": self.ids[index], "labels": self.labels[index]}
        return {**row, "attention_mask": self.mask[index]} if self.padded else row


class FineTune(L.LightningModule):
    """The module of the README, with a tiny model; it knows nothing of stages."""

    def __init__(self, family: str = "llama", dtype: torch.dtype = torch.float32, **overrides: Any) -> None:
        super().__init__()
        self.family, self.model_dtype, self.overrides = family, dtype, overrides

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = tiny_model(self.family, self.model_dtype, attention="sdpa", **self.overrides)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, prog_bar=True, sync_dist=True)

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.model(**batch).loss, sync_dist=True)

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # A large eps keeps Adam from blowing up rounding in gradients that should be zero.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class Recorder(Callback):
    """Remembers every training loss, as the user's code saw it."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))


@dataclass(frozen=True)
class Scenario:
    """One training run, but for the strategy.

    Attributes:
        module: keyword arguments of `FineTune`.
        trainer: keyword arguments of the Trainer.
        strategy: keyword arguments of `Seq1F1BStrategy`.
        padded: right-padded rows with a mask.
        rows: of training data; validation has five.
        shuffle: of the training loader.
    """

    module: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    padded: bool = False
    rows: int = 8
    shuffle: bool = False
    module_class: type[FineTune] = FineTune


@dataclass
class Outcome:
    """What a run ended with; `weights` are those of the whole module, on rank 0 only."""

    losses: list[float]
    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def loaders(scenario: Scenario) -> tuple[DataLoader, DataLoader]:
    """Batches of three rows; the last one of the training data is smaller."""
    train = Rows(scenario.rows, padded=scenario.padded, seed=1)
    val = Rows(5, padded=scenario.padded, seed=2)
    return DataLoader(train, batch_size=3, shuffle=scenario.shuffle), DataLoader(val, batch_size=3)


def train(scenario: Scenario, devices: int | None) -> Outcome:
    """Run a scenario with our strategy on `devices` processes, or with strategy="auto" on one device when None."""
    torch.manual_seed(0)
    recorder = Recorder()
    where = (
        {"devices": 1, "strategy": "auto"}
        if devices is None
        else {"devices": devices, "strategy": Seq1F1BStrategy(**scenario.strategy)}
    )
    trainer = L.Trainer(**{**QUIET, "max_epochs": 2, **scenario.trainer}, **where, callbacks=[recorder])
    module = scenario.module_class(**scenario.module)
    trainer.fit(module, *loaders(scenario))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(recorder.losses, metrics, trainer.strategy.lightning_module_state_dict())


def train_all(rank: int, scenarios: list[Scenario], devices: int) -> list[Outcome]:
    """For `run_processes`: several scenarios one after the other on the same processes."""
    return [train(scenario, devices) for scenario in scenarios]


def assert_same(outcomes: list[Outcome], expected: Outcome, tolerance: float) -> None:
    """Losses and metrics of every rank, and all weights, are those of one device."""
    for rank, outcome in enumerate(outcomes):
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=0, atol=tolerance, msg=f"losses of {rank}")
        assert outcome.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            assert abs(outcome.metrics[name] - value) <= tolerance, (rank, name, outcome.metrics[name], value)
    weights = outcomes[0].weights
    assert list(weights) == list(expected.weights)
    for name, value in expected.weights.items():
        torch.testing.assert_close(
            weights[name], value, rtol=0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )
