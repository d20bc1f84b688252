"""The user's program of the fault drill: it trains on two stages, saves every second step, and something goes wrong.

`python drill_program.py JSON` runs it as a script, with the fields of `Drill`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.failing import Failing, FailingCallback, fail, say_when
from support.fitting import SHORT
from support.training import QUIET, FineTune, Recorder, Rows
from torch.utils.data import DataLoader, IterableDataset

from lightning_seq1f1b import Seq1F1BStrategy

WORLD_SIZE = 2
BATCHES, BATCH_SIZE = 8, 2
FAILING_BATCH = 3
"""Between the first save, after two batches, and the second."""
MEASURED_SAVE, FAILING_SAVE = 2, 3
SEED = 1
MODEL: dict[str, Any] = {"dtype": torch.float64}


@dataclass(frozen=True)
class Drill:
    """One run.

    Attributes:
        folder: of its checkpoints.
        place: where something goes wrong; "" for a run in which nothing does.
        rank: on whom.
        sharded: how it saves.
        moment: of what happens during a save: 0 at its beginning, 1 at its end.
        patience_s: the strategy's timeout, 0 for its default.
        checkpoint: to go on from.
    """

    folder: str
    place: str = ""
    rank: int = 0
    sharded: bool = False
    moment: float = 0.0
    patience_s: float = 0.0
    checkpoint: str | None = None

    @property
    def saved(self) -> Path:
        """The one checkpoint, which every save replaces."""
        return Path(self.folder) / "state.ckpt"


def run(drill: Drill) -> None:
    """Train to the end, or to the fault."""
    options: dict[str, Any] = {"state_dict_type": "sharded"} if drill.sharded else {}
    if drill.patience_s:
        options["timeout"] = timedelta(seconds=drill.patience_s)
    if drill.place == "nan":
        options["check_finite"] = True
    trainer = make_trainer(Path(drill.folder), WORLD_SIZE, Seq1F1BStrategy(num_chunks=3, **options), FailingCallback())
    faulty = trainer.global_rank == drill.rank
    if faulty and drill.place in ("killed while saving", "disk full"):
        watch_saves(trainer, drill)
    if drill.checkpoint is not None and faulty:
        say_when()
    module = Failing(drill.place, drill.rank, FAILING_BATCH, **MODEL)
    trainer.fit(module, loader(drill.place, faulty), ckpt_path=drill.checkpoint)


def go_on(rank: int, checkpoint: str | None, folder: str, devices: int = 1) -> tuple[int, list[float]]:
    """For `run_processes`: train to the end, from a checkpoint if there is one.

    Returns:
        The batch with which it began, and the losses from there on.
    """
    recorder = Begin()
    trainer = make_trainer(Path(folder), devices, Seq1F1BStrategy(num_chunks=3), recorder)
    trainer.fit(FineTune(**MODEL), loader(), ckpt_path=checkpoint)
    return recorder.begin, recorder.losses


class Begin(Recorder):
    """Remembers the losses, and at which batch they begin."""

    begin = -1

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self.begin < 0:
            self.begin = trainer.global_step


def make_trainer(folder: Path, devices: int, strategy: Seq1F1BStrategy, *callbacks: Callback) -> L.Trainer:
    """A Trainer whose every second step replaces one checkpoint."""
    torch.manual_seed(SEED)
    save = ModelCheckpoint(
        folder, "state", every_n_train_steps=2, enable_version_counter=False, save_on_train_epoch_end=False
    )
    options = {**QUIET, "enable_checkpointing": True}
    return L.Trainer(**options, devices=devices, strategy=strategy, max_epochs=1, callbacks=[*callbacks, save])


# ---- data ----------------------------------------------------------------------------------------------------------


class FaultyRows(Rows):
    """Rows of which one cannot be read as it should, for `FAILING_BATCH`."""

    def __init__(self, place: str) -> None:
        fewer = place == "fewer batches"
        super().__init__(BATCH_SIZE * (FAILING_BATCH if fewer else BATCHES), length=SHORT, seed=SEED)
        self.place = place

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        # A worker reads two batches ahead.
        batch = FAILING_BATCH + 2 if "worker" in self.place else FAILING_BATCH
        if index == batch * BATCH_SIZE:
            if self.place in ("loader", "loader's worker"):
                fail()
            elif self.place == "loader's worker killed":
                say_when()
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.place == "other data":
                say_when()
                row["input_ids"] = row["input_ids"].flip(0)
        return row


class Stream(IterableDataset):
    """The same rows, of which nobody knows how many there are."""

    def __init__(self, ends: bool) -> None:
        self.rows, self.ends = FaultyRows(""), ends

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from (self.rows[index] for index in range(BATCH_SIZE * (FAILING_BATCH if self.ends else BATCHES)))
        if self.ends:
            say_when()


def loader(place: str = "", faulty: bool = False) -> DataLoader:
    """Eight batches in order."""
    if place == "stream ends":
        return DataLoader(Stream(faulty), batch_size=BATCH_SIZE)
    if place == "fewer batches" and faulty:
        say_when()
    place = place if faulty else ""
    return DataLoader(FaultyRows(place), batch_size=BATCH_SIZE, num_workers=1 if "worker" in place else 0)


# ---- faults while saving -------------------------------------------------------------------------------------------


def watch_saves(trainer: L.Trainer, drill: Drill) -> None:
    """Let a save of this process fail."""
    save, count, events = trainer.save_checkpoint, 0, 0

    def save_checkpoint(*args: Any, **options: Any) -> None:
        nonlocal count, events
        count += 1
        if drill.place == "disk full":
            if count == FAILING_SAVE:
                fill(drill)
            save(*args, **options)
        elif count == MEASURED_SAVE:
            events = counted(lambda: save(*args, **options))
        elif count == FAILING_SAVE:
            at_event(int(drill.moment * events), lambda: save(*args, **options), die_now)
        else:
            save(*args, **options)

    trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]  # to act in the middle of it


def counted(function: Callable[[], None]) -> int:
    """How many calls and returns of Python and C functions something consists of, in all threads that it starts."""
    events = 0

    def count(*_: Any) -> None:
        nonlocal events
        events += 1

    _profiled(function, count)
    return events


def at_event(number: int, function: Callable[[], None], then: Callable[[], None]) -> None:
    """Run something, and something else at its so many-th call or return; after it, if it has fewer."""
    events = 0

    def count(*_: Any) -> None:
        nonlocal events
        events += 1
        if events > number:
            then()

    _profiled(function, count)
    then()


def _profiled(function: Callable[[], None], count: Callable[..., None]) -> None:
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def die_now() -> None:
    """Be killed."""
    say_when()
    os.kill(os.getpid(), signal.SIGKILL)


def fill(drill: Drill) -> None:
    """Leave room for a part of a checkpoint only: on the disk, where it is small, else by the size of a file."""
    size = sum(each.stat().st_size for each in (drill.saved, *drill.saved.rglob("*")) if each.is_file())
    room = int(drill.moment * size)
    say_when()
    if not os.path.ismount(drill.folder):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        return
    disk = os.statvfs(drill.folder)
    filler = os.open(Path(drill.folder) / "filler", os.O_WRONLY | os.O_CREAT)
    os.posix_fallocate(filler, 0, max(1, disk.f_bavail * disk.f_frsize - room))
    os.close(filler)


if __name__ == "__main__":
    run(Drill(**json.loads(sys.argv[1])))
