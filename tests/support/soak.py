"""Two hundred steps on two ranks, with validation, checkpoints and logging between them, must not let anything grow."""

from __future__ import annotations

import gc
import os
import resource
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from support.fitting import SHORT
from support.processes import run_processes
from support.training import QUIET, FineTune, Rows
from torch.utils.data import DataLoader

from lightning_seq1f1b import Seq1F1BStrategy

STEPS, EVERY = 200, 20
WARM_UP = 80
"""Steps after which everything has its size: caches are filled, and threads and connections are there."""
GROWTH_BYTES = 4 << 20
"""Resident memory may vary by so much; the allocator keeps what it was given back in pieces."""


@dataclass(frozen=True)
class Sizes:
    """What a process holds after a step.

    Attributes:
        step: which.
        resident: bytes of memory.
        tensors: living tensors.
        handles: open files, sockets and the like.
        threads: of Python and of C++.
        objects: whatever Python's collector knows.
    """

    step: int
    resident: int
    tensors: int
    handles: int
    threads: int
    objects: int


class Weigh(Callback):
    """Notes the sizes after every `EVERY` steps."""

    def __init__(self) -> None:
        self.sizes: list[Sizes] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % EVERY == EVERY // 2:
            self.sizes.append(sizes(trainer.global_step))


def sizes(step: int) -> Sizes:
    """What this process holds now."""
    gc.collect()
    known = gc.get_objects()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in known)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    handles, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return Sizes(step, pages * resource.getpagesize(), tensors, handles, threads, len(known))


def run(rank: int, folder: str) -> list[Sizes]:
    """For `run_processes`: train and weigh."""
    threading.current_thread().name = f"rank {rank}"
    torch.manual_seed(1)
    weigh = Weigh()
    save = ModelCheckpoint(folder, "state", every_n_train_steps=EVERY, save_last=True, enable_version_counter=False)
    options = {**QUIET, "enable_checkpointing": True, "logger": CSVLogger(folder, flush_logs_every_n_steps=EVERY)}
    trainer = L.Trainer(
        **options,
        devices=2,
        strategy=Seq1F1BStrategy(num_chunks=3),
        max_steps=STEPS,
        val_check_interval=EVERY,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        callbacks=[weigh, save],
    )
    train = DataLoader(Rows(50, length=SHORT, seed=1), batch_size=2)
    trainer.fit(FineTune(), train, DataLoader(Rows(4, length=SHORT, seed=2), batch_size=2))
    return weigh.sizes


def soak(folder: Path) -> dict[str, Any]:
    """Run it; the sizes of both ranks, what has grown, and whether that is nothing."""
    by_rank = run_processes(run, 2, str(folder), timeout_s=240.0)
    grown = [f"rank {rank}: {each}" for rank, taken in enumerate(by_rank) for each in growth(taken)]
    last = [taken[-1] for taken in by_rank]
    says = "; ".join(grown) or (
        f"{STEPS} steps, nothing grows: {[each.resident >> 20 for each in last]} MiB, "
        f"{[each.handles for each in last]} handles, {[each.threads for each in last]} threads, "
        f"{[each.tensors for each in last]} tensors"
    )
    return {"passed": not grown, "says": says, "sizes": [[asdict(each) for each in taken] for taken in by_rank]}


def growth(taken: list[Sizes]) -> list[str]:
    """What is larger at the end than after the warm-up, in words."""
    warm = [each for each in taken if each.step >= WARM_UP]
    first, last = warm[: len(warm) // 2], warm[len(warm) // 2 :]
    assert first
    found = []
    for what, allowed in (("resident", GROWTH_BYTES), ("tensors", 0), ("handles", 0), ("threads", 0)):
        before, after = (max(getattr(each, what) for each in part) for part in (first, last))
        if after > before + allowed:
            found.append(f"{what} grew from {before} to {after}")
    return found
