"""`lightning-seq1f1b consolidate`: a sharded checkpoint as the one file that one device would have written."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_seq1f1b.strategy.sharded_reading import whole_checkpoint
from lightning_seq1f1b.strategy.whole_files import whole_file


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-seq1f1b consolidate",
        description="Write a sharded checkpoint as one file, which Lightning loads anywhere.",
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="a directory that the Trainer wrote")
    parser.add_argument("--output", type=Path, required=True, help="the file to write; it must not exist yet")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="read also what is no tensor or plain value, which can execute code: for your own checkpoints only",
    )
    arguments = parser.parse_args(argv)
    try:
        consolidate(arguments.checkpoint, arguments.output, weights_only=not arguments.trust)
    except pickle.UnpicklingError as error:
        parser.error(f"{str(error).split('. ')[0]}. If you trust the file, say --trust")
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{arguments.output} cannot be written: {error}")
    print(f"{arguments.output}: {arguments.output.stat().st_size >> 20} MiB")
    return 0


def consolidate(directory: Path, file: Path, *, weights_only: bool = True) -> None:
    """Write a sharded checkpoint as one file, with everything that is in it; all of it is in memory meanwhile.

    Args:
        directory: the checkpoint.
        file: where to; it appears once all is in it.
        weights_only: refuse a checkpoint that holds more than tensors and plain values.

    Raises:
        OSError: the file cannot be written.
        pickle.UnpicklingError: the checkpoint holds more, and `weights_only`.
        ValueError: it is no whole sharded checkpoint, or there is something by the file's name already.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory: a sharded checkpoint is one")
    if file.exists():
        raise ValueError(f"{file} exists already: choose another name")
    content = whole_checkpoint(directory, weights_only)
    with whole_file(file) as opened:
        torch.save(content, opened)
