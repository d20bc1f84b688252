"""Refuses by name, before anything runs, what would be wrong or silently different under a pipeline."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")

_FOREIGN = (BitsandbytesPrecision, TransformerEnginePrecision, DeepSpeedPrecision, FSDPPrecision, XLAPrecision)
"""They replace layers, or belong to another strategy, and may call themselves "32-true" all the same."""

_CALLBACKS: tuple[tuple[type[Callback], str], ...] = (
    (BaseFinetuning, "it adds parameter groups while training, on the one stage that holds the module"),
    (StochasticWeightAveraging, "it copies the whole model before the stages are cut"),
    (WeightAveraging, "it copies the whole model before the stages are cut, and would save one stage's average as all"),
)


def check_precision(plugin: Precision) -> None:
    """Raise ValueError for a precision that is not proven to equal one device."""
    foreign = isinstance(plugin, _FOREIGN)
    if foreign or plugin.precision not in PRECISIONS:
        given = f"the precision plugin {type(plugin).__name__}" if foreign else f"precision={plugin.precision!r}"
        raise ValueError(f"Seq1F1BStrategy does not support {given}; choose one of {', '.join(PRECISIONS)}")


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
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise ValueError(
            "Seq1F1BStrategy does not support processes started by spawn or fork: they run a function and give back "
            "one stage's weights as the whole model's; start your program's file, by python or torchrun"
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


_NEED_ALL_PARAMETERS = (
    "DAdaptAdaGrad",
    "DAdaptAdam",
    "DAdaptAdan",
    "DAdaptLion",
    "DAdaptSGD",
    "FusedLAMB",
    "Prodigy",
    "SAM",
)
"""Classes of other packages, by name, whose steps take a sum over all parameters: each rank would take its part's."""


def check_optimizer(optimizer: Optimizer, num_parts: int) -> None:
    """Raise ValueError for optimizers whose step needs sums over all parameters.

    Args:
        optimizer: any.
        num_parts: ranks that the parameters it steps are shared out to.
    """
    names = {each.__name__ for each in type(optimizer).__mro__}
    if num_parts > 1 and not names.isdisjoint(_NEED_ALL_PARAMETERS):
        raise ValueError(
            f"Seq1F1BStrategy does not support {type(optimizer).__name__}: each of its steps needs a sum over all "
            "parameters, of which every rank holds a part; use an optimizer that steps each parameter by itself"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "Seq1F1BStrategy does not support LBFGS: it needs dot products over all stages and several closures a step"
        )
