"""A fit that writes checkpoints and goes on from them, and the comparison of two checkpoint files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.fitting import SHORT, Where
from support.training import QUIET, FineTune, Rows
from torch.utils.data import DataLoader

from lightning_seq1f1b import Seq1F1BStrategy
from lightning_seq1f1b.strategy.data_state import ENTRY

EPOCH_BATCHES = 3
END = "end.ckpt"


class Resumable(FineTune):
    """Tied embeddings in float64, weight decay on matrices only, a learning rate that changes with every step.

    Args:
        tied: whether the embeddings and the head are one weight.
        named: make the optimizer from names and parameters, as `named_parameters()` gives them.
        learning_rate: of AdamW, at the first step.
    """

    def __init__(self, tied: bool = True, named: bool = False, learning_rate: float = 1e-2) -> None:
        super().__init__("llama", torch.float64, tie_word_embeddings=tied)
        self.save_hyperparameters()
        self.saved_keys: list[int] = []

    def configure_optimizers(self) -> dict[str, Any]:
        groups: tuple[list[Any], list[Any]] = ([], [])
        for name, parameter in self.named_parameters():
            groups[parameter.ndim < 2].append((name, parameter) if self.hparams["named"] else parameter)
        decay = [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(decay, lr=self.hparams["learning_rate"], eps=1e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved_keys.append(len(checkpoint["state_dict"]))
        checkpoint["the user's own"] = {"steps": self.global_step}


class Counter(Callback):
    """Counts batches, over all runs that a checkpoint has joined."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


class Continuing(DataLoader):
    """Goes on, after a resume, behind the batches it had given when the checkpoint was written."""

    given = skipped = 0

    def __iter__(self) -> Iterator[Any]:
        self.given, self.skipped = self.skipped, 0
        for batch in itertools.islice(super().__iter__(), self.given, None):
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["given"] % len(self)


def make_trainer(
    where: Where, directory: Path | None = None, callbacks: Sequence[Callback] = (), **options: Any
) -> L.Trainer:
    """A Trainer at a place, which keeps checkpoints in `directory`: after each epoch, and after every two steps."""
    callbacks = list(callbacks)
    if directory is not None:
        callbacks.append(ModelCheckpoint(directory, "{epoch}", save_top_k=-1, save_last=True))
        callbacks.append(ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=-1))
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    strategy = where.strategy if isinstance(where.strategy, str) else Seq1F1BStrategy(**dict(where.strategy))
    options = {**QUIET, "enable_checkpointing": saves, **options}
    return L.Trainer(devices=where.devices, strategy=strategy, callbacks=callbacks, **options)


def batches() -> Continuing:
    """Three batches, the last one smaller."""
    return Continuing(Rows(8, length=SHORT, seed=1), batch_size=3)


def fit(
    where: Where, directory: Path, epochs: int, ckpt_path: Path | str | None = None, module: FineTune | None = None
) -> None:
    """Train up to `epochs`, keep checkpoints in `directory`, and write the state after all as `END`."""
    torch.manual_seed(0)
    trainer = make_trainer(where, directory, [Counter()], max_epochs=epochs)
    trainer.fit(module or Resumable(), batches(), ckpt_path=ckpt_path)
    trainer.save_checkpoint(directory / END)


def load(path: Path) -> dict[str, Any]:
    """A checkpoint file's content, as the default of torch reads it."""
    return torch.load(path, weights_only=True)


def assert_same_content(path: Path, truth: Path, tolerance: float = 1e-6, *, without: Sequence[str] = ()) -> None:
    """Two checkpoint files have the same content in the same order; numbers are equal within the tolerance.

    Args:
        path: the file to judge.
        truth: what one device wrote.
        tolerance: largest difference of floating point numbers.
        without: top-level entries that are not compared.
    """
    got, expected = load(path), load(truth)
    for content in (got, expected):
        content.pop(ENTRY, None)  # of a run under stages alone; judged by what resumed runs do
        for key in without:
            del content[key]
    _compare(got, expected, tolerance, path.parent, truth.parent, "checkpoint")
    assert shared(got["state_dict"]) == shared(expected["state_dict"])


def shared(state: Mapping[str, Any]) -> list[set[str]]:
    """Names that share one memory, for every memory that several names share."""
    by_memory: dict[int, set[str]] = {}
    for name, tensor in state.items():
        by_memory.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return [names for names in by_memory.values() if len(names) > 1]


def _compare(got: Any, expected: Any, tolerance: float, ours: Path, theirs: Path, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype, where
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, Mapping):
        assert list(got) == list(expected), where
        for key, value in expected.items():
            _compare(got[key], value, tolerance, ours, theirs, f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for place, (one, other) in enumerate(zip(got, expected, strict=True)):
            _compare(one, other, tolerance, ours, theirs, f"{where}[{place}]")
    elif isinstance(expected, float):
        assert abs(got - expected) <= tolerance, (where, got, expected)
    elif isinstance(expected, str):
        assert got.replace(str(ours), "") == expected.replace(str(theirs), ""), where
    else:
        assert got == expected, (where, got, expected)
