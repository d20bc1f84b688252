"""Tells the user what lies where, and shows the whole model where Lightning would show one stage."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary

from lightning_seq1f1b.strategy.cut_module import CutModule
from lightning_seq1f1b.strategy.supported import callbacks_of


def describe(cut: CutModule, schedule: str) -> str:
    """One line for the log: schedule, stages, replicas, and the layers on every rank of a pipeline."""
    topology = cut.topology
    stages = f"{topology.num_stages} stage(s)"
    if cut.virtual_stages > 1:
        stages = f"{topology.num_stages} rank(s) x {cut.virtual_stages} virtual stages"
    layers = ", ".join(f"{rank}: {_layers_of(cut, rank)}" for rank in range(topology.num_stages))
    return (
        f"Seq1F1B: {type(cut.model).__name__} by schedule {schedule!r} on {stages} x {topology.num_replicas} "
        f"replica(s); layers on each pipeline rank: {layers}"
    )


def _layers_of(cut: CutModule, rank: int) -> str:
    ranges = cut.layer_ranges[rank :: cut.topology.num_stages]
    return " and ".join(f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0]) for layers in ranges)


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
