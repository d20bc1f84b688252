"""Tiny checkpoints on the disk, and a module that loads one; mended or spoilt as a test wants."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import load_file, save_file
from support.fitting import SHORT, Where
from support.tiny_models import tiny_model
from support.training import QUIET, FineTune, Rows
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_seq1f1b import Seq1F1BStrategy


class Pretrained(FineTune):
    """Loads a checkpoint in `configure_model` as everybody does, and remembers what it then saw.

    Args:
        path: of the checkpoint.
        then: called with the module after loading, at the end of `configure_model`.
        options: keyword arguments of `from_pretrained`.
    """

    def __init__(self, path: Path | str, then: Callable[[Any], None] | None = None, **options: Any) -> None:
        super().__init__()
        self.path, self.then, self.options = path, then, options
        self.names: list[str] = []
        self.empty: set[str] = set()

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        self.model = AutoModelForCausalLM.from_pretrained(self.path, **self.options).train()
        self.names = list(self.model.state_dict())
        self.empty = {name for name, value in self.model.state_dict().items() if value.is_meta}
        if self.then is not None:
            self.then(self)


def write_checkpoint(folder: Path, family: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> Path:
    """A tiny model's checkpoint in several files."""
    tiny_model(family, dtype, **overrides).save_pretrained(folder, max_shard_size="50KB")
    return folder


def spoil(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Change the tensors of a checkpoint, which is put into one file."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stored_names(folder: Path) -> set[str]:
    """Names of the tensors in a checkpoint of several files, as its index tells."""
    return set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])


def rows(count: int = 8) -> DataLoader:
    """Batches of three short rows."""
    return DataLoader(Rows(count, length=SHORT, seed=1), batch_size=3)


def trainer(where: Where, **options: Any) -> L.Trainer:
    """A quiet Trainer at a place."""
    strategy = where.strategy if isinstance(where.strategy, str) else Seq1F1BStrategy(**dict(where.strategy))
    return L.Trainer(**{**QUIET, "max_steps": 2, **options}, devices=where.devices, strategy=strategy)
