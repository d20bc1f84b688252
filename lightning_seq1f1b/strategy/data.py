"""Keeps the stages of a replica on the same data."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader


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
