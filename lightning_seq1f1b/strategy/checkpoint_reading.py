"""Reads checkpoint files without executing anything in them, and says of others what they are instead."""

from __future__ import annotations

import errno
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_seq1f1b.strategy.checksums import changed_record

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_KEPT_IN_FILE = ("state_dict", "optimizer_states")
_GLOBAL = re.compile(r"GLOBAL (\S+)")


def read_checkpoint(path: Path, weights_only: bool = True, *, verify: bool = True) -> dict[str, Any]:
    """The content of a checkpoint of one file. Weights and optimizer states stay in the file until they are used.

    Args:
        path: a local file.
        weights_only: read nothing but tensors and plain values, as `torch.load` takes it.
        verify: see `read_trusted`.

    Raises:
        FileNotFoundError: there is no such file.
        pickle.UnpicklingError: it holds something else, and `weights_only`.
        ValueError: it is empty, cut off, damaged, or no checkpoint of a Trainer.
    """
    content = read_trusted(path, weights_only, verify=verify)
    if not isinstance(content, Mapping) or "state_dict" not in content:
        if isinstance(content, Mapping) and content and all(isinstance(value, Tensor) for value in content.values()):
            raise ValueError(
                f"{path} holds weights only ({len(content)} tensors), and is no checkpoint of a Trainer: load it into "
                "the model, with module.load_state_dict(torch.load(path)), before fit"
            )
        raise ValueError(f"{path} is no checkpoint of a Trainer: it has no entry 'state_dict'")
    return {
        # What is small is copied: one tensor of it would keep the whole file mapped.
        key: value if key in _KEPT_IN_FILE else _copied(value)
        for key, value in content.items()
    }


def read_trusted(path: Path, weights_only: bool, *, verify: bool = True) -> Any:
    """What `torch.save` has put into a file, its tensors mapped into memory where the format can.

    Args:
        path: a local file.
        weights_only: read nothing but tensors and plain values.
        verify: compare all content with its checksums, which reads the whole file once.

    Raises:
        FileNotFoundError: there is no such file.
        pickle.UnpicklingError: it holds more than tensors and plain values, and `weights_only`.
        ValueError: it is empty, cut off, damaged, or of another format.
    """
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    with path.open("rb") as file:
        start = file.read(9)
    if not start:
        raise ValueError(f"{path} is empty: whatever wrote it was ended before it had written anything")
    if start[8:] == b"{":
        raise ValueError(
            f"{path} is a safetensors file and holds weights only: load them with from_pretrained in configure_model"
        )
    if not start.startswith((_ZIP, _PICKLE)):
        raise ValueError(f"{path} is no checkpoint: it does not begin like a file that torch.save wrote")
    try:
        content = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=start.startswith(_ZIP))
    except pickle.UnpicklingError as error:
        if (found := _GLOBAL.search(str(error))) is None:
            raise ValueError(f"{path} is cut off or damaged: what it holds cannot be read") from error
        raise pickle.UnpicklingError(
            f"{path} holds {found[1]}, which is no tensor or plain value, and loading it could execute code. If you "
            "trust the file, pass weights_only=False to trainer.fit, validate, test or predict"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is cut off or damaged: {_first_sentence(error)}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{path} is cut off or damaged: its end is missing") from error  # sought before the start
    if verify and start.startswith(_ZIP):
        with path.open("rb") as file:
            changed = changed_record(file)
        if changed is not None:
            raise ValueError(f"{path} is damaged: {changed} has changed since it was written")
    return content


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0] or "its end is missing"
