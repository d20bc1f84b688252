"""Tells the user what lies where, and shows the whole model where Lightning would show one stage."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary

from lightning_seq1f1b.strategy.cut_module import CutModule
from lightning_seq1f1b.strategy.supported import callbacks_of


def describe(cut: CutModule, schedule: str) -> str:
    """One line for the log: schedule, stages, replicas, and the layers of every stage."""
    topology = cut.topology
    layers = ", ".join(f"{stage}: {layers.start}-{layers.stop - 1}" for stage, layers in enumerate(cut.layer_ranges))
    return (
        f"Seq1F1B: {type(cut.model).__name__} by schedule {schedule!r} on {topology.num_stages} stage(s) x "
        f"{topology.num_replicas} replica(s); layers of each stage: {layers}"
    )


def show_whole_model(trainer: pl.Trainer) -> None:
    """Make the Trainer's model summaries count the whole model instead of this rank's stage.

    The public hook is wrapped on the callback's instance, once; it asks the strategy what is cut when it runs.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, ModelSummary) and "on_fit_start" not in vars(callback):
            callback.on_fit_start = _over_whole(callback.on_fit_start)  # type: ignore[method-assign]


def _over_whole(on_fit_start: Callable[..., None]) -> Callable[..., None]:
    def over_whole(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with trainer.strategy.whole():  # type: ignore[attr-defined]
            on_fit_start(trainer, pl_module)

    return over_whole
