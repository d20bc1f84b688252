"""Where Lightning's fit loop will take its next batch from: which epoch, and behind how many of its batches."""

from __future__ import annotations

from typing import Literal, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.loops.progress import _ProcessedTracker


class LoopPlace(NamedTuple):
    """What the next iterator of the training data is for.

    Attributes:
        epoch: its number.
        consumed: batches of it that an earlier run has trained on, where that was interrupted within it.
        state: whether the iterator "begins" the epoch, is "within" it, or is not used because it is "over".
    """

    epoch: int
    consumed: int
    state: Literal["begins", "within", "over"]


def loop_place(trainer: pl.Trainer, epoch_batches: float | None = None) -> LoopPlace:
    """Where the fit loop stands, before and while it restores itself from a checkpoint.

    Lightning counts what is done, and settles only when it runs where that leaves it. A checkpoint written behind the
    last batch of an epoch leads straight into the next one; one written by a validation there first ends its epoch.

    Args:
        trainer: of the run.
        epoch_batches: of an epoch, where the checkpoint says it; else only the loader's end counts as that of an epoch.
    """
    loop = trainer.fit_loop
    epoch, batch = loop.epoch_progress.current, loop.epoch_loop.batch_progress
    assert isinstance(epoch, _ProcessedTracker)
    assert isinstance(batch.current, _ProcessedTracker)
    assert isinstance(batch.total, _ProcessedTracker)
    if not loop.restarting or epoch.processed == epoch.ready:
        return LoopPlace(epoch.processed, 0, "begins")
    trained = batch.current.processed
    if not batch.is_last_batch and (epoch_batches is None or trained < epoch_batches):
        return LoopPlace(epoch.processed, trained, "within")
    if batch.is_last_batch and batch.total.completed == batch.total.processed - 1:
        return LoopPlace(epoch.processed + 1, 0, "begins")
    return LoopPlace(epoch.processed, 0, "over")


def coming_epoch(trainer: pl.Trainer | None) -> int:
    """The epoch that rows are about to be taken for; 0 without a Trainer."""
    return 0 if trainer is None else loop_place(trainer).epoch
