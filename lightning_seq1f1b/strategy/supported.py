"""Refuses by name, before anything runs, what would be wrong or silently different under a pipeline."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")

_CALLBACKS: tuple[tuple[type[Callback], str], ...] = (
    (BaseFinetuning, "it adds parameter groups while training, on the one stage that holds the module"),
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


def check_gradient_hooks(module: nn.Module) -> None:
    """Raise ValueError for hooks that would act on a part of a gradient: each chunk adds its own to `.grad`."""
    for name, parameter in module.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"Seq1F1BStrategy does not support register_post_accumulate_grad_hook, which {name} has: it would run "
                "for every chunk instead of once a step; use on_after_backward"
            )
        if getattr(parameter, "_backward_hooks", None):
            rank_zero_warn(
                "a hook registered on a parameter by register_hook runs once for every chunk, on that chunk's part of "
                f"the gradient ({name} has one): that equals one device for masks and factors, not for clamps or norms"
            )


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError for optimizers whose step needs dot products over all stages."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "Seq1F1BStrategy does not support LBFGS: it needs dot products over all stages and several closures a step"
        )
