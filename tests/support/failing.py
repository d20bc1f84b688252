"""A user's program in which one rank fails, at a place of choice: `python failing.py PLACE RANK WORLD_SIZE`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from support.fitting import SHORT
from support.training import QUIET, FineTune, Rows
from torch.utils.data import DataLoader

from lightning_seq1f1b import Seq1F1BStrategy

MESSAGE = "the user's own mistake"
BUSY_S = 100
HOLDING_S = 12


class UsersError(Exception):
    """What the user's code raises; its text is not its only argument."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code, self.text = code, text

    def __str__(self) -> str:
        return f"{self.text} ({self.code})"


def fail(*_: Any) -> NoReturn:
    """Raise, after saying when."""
    say_when()
    raise UsersError(7, MESSAGE)


def die() -> None:
    """End as if the system had ended the process for want of memory."""
    say_when()
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stand still, all threads together, as on a machine that hangs."""
    say_when()
    os.kill(os.getpid(), signal.SIGSTOP)


def stall(*_: Any) -> None:
    """Be busy for much longer than the others wait."""
    say_when()
    time.sleep(BUSY_S)


def run_out_of_memory(*_: Any) -> NoReturn:
    """Raise what an accelerator does."""
    say_when()
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def spoil(module: Any, inputs: Any, output: Any) -> Any:
    """A forward hook that makes the output NaN."""
    say_when()
    return output * float("nan")


def say_when() -> None:
    """Print the line by which the time of the failure is known."""
    print(f"fails at {time.time()}\n", end="", flush=True)


class Failing(FineTune):
    """Trains, then fails on one rank; in the cases that say so, the other ranks are busy meanwhile.

    Args:
        place: where it fails.
        rank: who fails.
        batch: index of the batch.
        module: what `FineTune` takes.
    """

    def __init__(self, place: str, rank: int, batch: int = 1, **module: Any) -> None:
        super().__init__(**module)
        self.place, self.rank, self.batch = place, rank, batch

    def at(self, place: str) -> bool:
        return self.place == place and self.global_rank == self.rank

    def setup(self, stage: str) -> None:
        if self.at("setup"):
            fail()

    def on_train_start(self) -> None:
        if self.at("before a collective"):
            fail()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.batch:
            self.fail_in_step()
        return super().training_step(batch, batch_idx)

    def fail_in_step(self) -> None:
        # The first layer of this rank's stage; the others of the list are stubs.
        layer = next(layer for layer in self.model.model.layers if any(True for _ in layer.parameters()))
        if self.at("step") or self.at("step, others busy"):
            fail()
        elif self.place == "all others killed" and self.global_rank != self.rank:
            die()
        elif self.at("holds the interpreter"):
            say_when()
            ctypes.PyDLL(None).sleep(int(HOLDING_S))
        elif self.at("memory"):
            layer.mlp.register_forward_hook(run_out_of_memory)
        elif self.at("killed") or self.at("killed, others busy"):
            die()
        elif self.at("stopped"):
            stop()
        elif self.at("stalled"):
            layer.mlp.register_forward_hook(stall)
        elif self.at("nan"):
            layer.mlp.register_forward_hook(spoil)
        elif self.at("forward"):
            layer.mlp.register_forward_hook(fail)
        elif self.at("backward"):
            layer.mlp.register_full_backward_hook(fail)
        elif self.place.endswith("others busy"):
            time.sleep(BUSY_S)


class FailingCallback(Callback):
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Failing, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.at("callback") and batch_idx == pl_module.batch:
            fail()


class FailingRows(Rows):
    def __init__(self, fails: bool, count: int = 8, then: Any = fail) -> None:
        super().__init__(count, length=SHORT)
        self.fails, self.then = fails, then

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.fails and index == 4:
            self.then()
        return super().__getitem__(index)


def main(place: str, rank: int, world_size: int, patience_s: float = 100.0) -> None:
    """Train on so many processes; the rank fails at the place."""
    strategy = Seq1F1BStrategy(num_chunks=3, check_finite=place == "nan", timeout=timedelta(seconds=patience_s))
    trainer = L.Trainer(**QUIET, devices=world_size, strategy=strategy, max_epochs=1, callbacks=[FailingCallback()])
    fails = place.startswith("data") and trainer.global_rank == rank
    rows = FailingRows(fails, then=stall if place == "data stalls" else fail)
    trainer.fit(Failing(place, rank), DataLoader(rows, batch_size=3))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
