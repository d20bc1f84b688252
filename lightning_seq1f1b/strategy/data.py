"""Keeps stages on the same data, all processes on the same course, and resumed runs at their place."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.types import _PATH
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_seq1f1b.strategy.data_state import DataState
from lightning_seq1f1b.strategy.steps import PipelineSteps


class PipelineData(PipelineSteps):
    """The part of a strategy that hands out data.

    Args:
        num_stages: stages of one replica; None for all processes.
        backend: of torch.distributed; None to choose by the device.
        timeout: how long a rank waits for another one.
        trace: time every forward and backward of a step.
    """

    broadcast_batch = False

    def __init__(self, num_stages: int | None, backend: str | None, timeout: timedelta, trace: bool) -> None:
        super().__init__(num_stages, backend, timeout, trace)
        self._data_state = DataState(self)

    @override
    def setup_environment(self) -> None:
        """Begin a run: what an earlier one has loaded does not count any more."""
        super().setup_environment()
        self._data_state.forget()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Seed the workers of all stages alike, and keep all processes, and resumed runs, in one order."""
        worker_seeds_by_replica(dataloader, self.topology.replica)
        return self._data_state.follow(dataloader)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device, after taking the first stage's when `broadcast_batch`."""
        if self.broadcast_batch:
            batch = share_batch(batch, self.topology.pipeline_ranks[0], self._process_groups.control)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_start(self) -> None:
        """The training data's iterators exist: random numbers go on from where a checkpoint was written."""
        super().on_train_start()
        self._data_state.restore()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write a checkpoint, with random states and the place in the data."""
        self._check_together()
        self._data_state.save(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint, and note what it says about random numbers and data."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._data_state.load(checkpoint)
        return checkpoint


def worker_seeds_by_replica(loader: object, replica: int) -> None:
    """Seed a loader's workers by the replica instead of the rank, so that random augmentation agrees on all stages.

    Lightning seeds them by rank after `seed_everything(workers=True)`, but leaves a loader alone that has an init
    function already.
    """
    asked = os.environ.get("PL_SEED_WORKERS") == "1"
    if asked and isinstance(loader, DataLoader) and loader.num_workers > 0 and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=replica)


def share_batch(batch: Any, first: int, group: dist.ProcessGroup) -> Any:
    """The batch of the pipeline's first rank, on all of its ranks.

    Args:
        batch: this rank's, on the CPU; ignored except on the first rank.
        first: global rank of the pipeline's first rank.
        group: the pipeline's control group.
    """
    box = [batch if dist.get_rank() == first else None]
    dist.broadcast_object_list(box, src=first, group=group)
    return box[0]
