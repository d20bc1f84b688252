"""A user's own LightningCLI program, with classes of the user's own; not the package's command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningCLI
from support.fitting import rows, weights
from support.training import FineTune
from torch.utils.data import DataLoader

from lightning_seq1f1b import Seq1F1BStrategy  # noqa: F401 (the import that makes the short class path work)

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
}


class Eager(FineTune):
    """Makes its model at once, so that an optimizer can be made before the Trainer does anything.

    Args:
        num_layers: of the model.
    """

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__(num_hidden_layers=num_layers)
        self.configure_model()


class Data(L.LightningDataModule):
    """Three batches."""

    def train_dataloader(self) -> DataLoader:
        return rows()


def program(arguments: Sequence[str], **options: Any) -> LightningCLI:
    """What the user's script consists of."""
    return LightningCLI(Eager, Data, seed_everything_default=3, trainer_defaults=QUIET, args=list(arguments), **options)


def fitted(arguments: Sequence[str], devices: int, folder: Path) -> dict[str, Any]:
    """The whole module's weights after the program's `fit` on so many processes; its config is saved in `folder`."""
    places = [f"--trainer.devices={devices}", f"--trainer.default_root_dir={folder}"]
    return weights(program(["fit", *places, *arguments]).trainer)


def all_fitted(rank: int, runs: Mapping[Path, Sequence[str]]) -> dict[Path, dict[str, Any]]:
    """For `run_processes`: several runs of the program on two processes, by the folder of each."""
    return {folder: fitted(arguments, 2, folder) for folder, arguments in runs.items()}
