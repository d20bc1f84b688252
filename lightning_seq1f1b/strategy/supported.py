"""Refuses by name, before anything runs, what would be wrong or silently different under a pipeline."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")

_CALLBACKS: tuple[tuple[type[Callback], str], ...] = (
    (StochasticWeightAveraging, "it copies the whole model before the stages are cut"),
    (WeightAveraging, "it copies the whole model before the stages are cut, and would save one stage's average as all"),
)


def check_precision(plugin: Precision) -> None:
    """Raise ValueError for a precision that is not proven to equal one device."""
    if plugin.precision not in PRECISIONS:
        raise ValueError(
            f"Seq1F1BStrategy does not support precision={plugin.precision!r}; choose one of {', '.join(PRECISIONS)}"
        )


def callbacks_of(trainer: pl.Trainer) -> list[Callback]:
    """The Trainer's callbacks; its class does not declare the attribute."""
    return trainer.callbacks  # type: ignore[attr-defined]


def check_trainer(trainer: pl.Trainer, layer_sync: object) -> None:
    """Raise ValueError for callbacks and Trainer options that a pipeline cannot honour."""
    if layer_sync is not None:
        raise ValueError("Seq1F1BStrategy does not support sync_batchnorm=True: language models have no batch norm")
    if trainer.world_size > 1 and getattr(trainer, "_val_check_time_interval", None) is not None:
        raise ValueError(
            "Seq1F1BStrategy does not support a time as val_check_interval: every process would decide by its own "
            "clock when to validate, and stages would wait for each other; give a number of batches"
        )
    for callback in callbacks_of(trainer):
        for refused, reason in _CALLBACKS:
            if isinstance(callback, refused):
                raise ValueError(f"Seq1F1BStrategy does not support the callback {type(callback).__name__}: {reason}")


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError for optimizers whose step needs dot products over all stages."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "Seq1F1BStrategy does not support LBFGS: it needs dot products over all stages and several closures a step"
        )
