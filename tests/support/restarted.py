"""A user's program that may be started again: it goes on from its last checkpoint, wherever it was ended.

`restarted.py FOLDER [RANK]`: on the first start the rank is killed in the middle.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.fitting import SHORT
from support.resuming import Continuing
from support.training import QUIET, FineTune, Rows

from lightning_seq1f1b import Seq1F1BStrategy

LAST = "end.ckpt"
KILLED_AT = 5


class Killed(Callback):
    """Ends this process, on the first start only, behind the second of four checkpoints."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
        if first and batch_idx == KILLED_AT and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        # One write, so that the lines of several processes do not mix.
        print(f"rank {trainer.global_rank} starts at step {trainer.global_step}\n", end="", flush=True)


def main(folder: str, rank: int = -1, devices: int = 2, strategy: str | None = None) -> None:
    """Train over eight batches, and write what was learned as `LAST`."""
    torch.manual_seed(1)
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_last=True)
    options = {**QUIET, "enable_checkpointing": True}
    places = {"devices": devices, "strategy": strategy or Seq1F1BStrategy(num_chunks=3)}
    trainer = L.Trainer(**options, **places, max_epochs=1, callbacks=[Killed(rank), save])
    rows = Continuing(Rows(16, length=SHORT, seed=1), batch_size=2)
    trainer.fit(FineTune(dtype=torch.float64), rows, ckpt_path="last")
    trainer.save_checkpoint(Path(folder) / LAST)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
