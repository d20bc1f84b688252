"""A user's program that a signal reaches in the middle of a schedule: `python signalled.py JSON`, of a `Signal`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from support.failing import FailingCallback, FailingRows, fail, say_when
from support.fitting import rows
from support.training import QUIET, FineTune
from torch.utils.data import DataLoader

from lightning_seq1f1b import Seq1F1BStrategy

BATCH = 1
BATCHES = 6
HANGS_S = 100
NOTICED_S = 1.0
"""Long enough for the thread that looks for signals twice a second."""


@dataclass(frozen=True)
class Signal:
    """One run.

    Attributes:
        folder: of its checkpoints and of what it reports.
        number: of the signal; 0 for an exception.
        rank: whom it reaches; None for the whole process group.
        place: where it comes: "forward", "validation", or "hang", a step that does not end.
        slurm: run as a job of SLURM, which is requeued.
        devices: processes.
    """

    folder: str
    number: int = 0
    rank: int | None = 0
    place: str = "forward"
    slurm: bool = False
    devices: int = 2


class Signalled(FineTune):
    """Is sent a signal, in a hook of a layer, in one batch."""

    def __init__(self, case: Signal) -> None:
        super().__init__()
        self.case = case
        self.place, self.rank, self.batch = case.place, case.rank, BATCH  # for FailingCallback

    @property
    def is_meant(self) -> bool:
        return self.case.rank is None or self.global_rank == self.case.rank

    def at(self, place: str) -> bool:
        return self.place == place and self.is_meant

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hangs = self.case.place == "hang" and self.global_rank == 1
        if batch_idx == BATCH and (hangs or self.is_meant):
            if self.at("step"):
                fail()
            if self.case.place in ("forward", "hang"):
                self.in_a_layer(self.hang if hangs else self.send)
        if BATCH < batch_idx < BATCHES - 1:
            time.sleep(NOTICED_S)  # these batches would otherwise be over first
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.at("validation") and batch_idx == 0 and not self.trainer.sanity_checking:
            self.in_a_layer(self.send)
        super().validation_step(batch, batch_idx)
        if self.case.place == "validation" and not self.trainer.sanity_checking:
            time.sleep(2 * NOTICED_S)

    def in_a_layer(self, action: Any) -> None:
        layer = next(layer for layer in self.model.model.layers if any(True for _ in layer.parameters()))
        hook = layer.mlp.register_forward_hook(lambda *_: (hook.remove(), action())[0])

    def send(self) -> None:
        if not self.case.number:
            fail()
        say_when()
        if self.case.place == "hang":
            # The main thread is about to wait for the other rank, in a call that no handler interrupts.
            threading.Timer(0.5, os.kill, (os.getpid(), self.case.number)).start()
            threading.Timer(2.5, os.kill, (os.getpid(), self.case.number)).start()
        elif self.case.rank is None:
            if self.global_rank == 0:
                os.killpg(0, self.case.number)
        else:
            os.kill(os.getpid(), self.case.number)

    def hang(self) -> None:
        time.sleep(HANGS_S)


class Saves(Callback):
    """Remembers at which steps checkpoints were made."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save_checkpoint(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append(trainer.global_step)


def pretend_slurm(folder: Path) -> None:
    """Set the variables of a job, and put a program before others that notes what it is asked."""
    command = folder / "scontrol"
    if os.environ["RANK"] == "0":
        command.write_text(f'#!/bin/sh\necho "$@" >> {folder}/requeued\n')
        command.chmod(0o755)
    world_size = os.environ["WORLD_SIZE"]
    os.environ |= {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": world_size,
        "SLURM_NTASKS_PER_NODE": world_size,
        "SLURM_PROCID": os.environ["RANK"],
        "SLURM_LOCALID": os.environ["LOCAL_RANK"],
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
    }


def main(case: Signal) -> None:
    """Train; every rank leaves a report of how its training ended."""
    options: dict[str, Any] = {}
    # A shell ignores interrupts in what it starts in the background, and Python leaves that as it finds it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if case.slurm:
        pretend_slurm(Path(case.folder))
        options["plugins"] = [SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)]
    torch.manual_seed(0)
    saves = Saves()
    save = ModelCheckpoint(case.folder, "saved", save_on_exception=True, save_last="link", every_n_epochs=9)
    trainer = L.Trainer(
        **{**QUIET, "enable_checkpointing": True},
        devices=case.devices,
        strategy=Seq1F1BStrategy(num_chunks=3),
        max_epochs=1,
        callbacks=[save, saves, FailingCallback()],
        default_root_dir=case.folder,
        **options,
    )
    module = Signalled(case)
    data = FailingRows(case.place == "data" and trainer.global_rank == case.rank, 3 * BATCHES)
    ended = "trained to the end"
    try:
        trainer.fit(module, DataLoader(data, batch_size=3), rows(4, 2))
    except BaseException as error:
        ended = type(error).__name__
        raise
    finally:
        report = {"ended": ended, "step": trainer.global_step, "saves": saves.steps}
        Path(case.folder, f"rank-{trainer.global_rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Signal(**json.loads(sys.argv[1])))
