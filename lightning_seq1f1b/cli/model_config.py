"""Reads a model's configuration from a directory, a file or the local cache of the hub, and nothing else of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_config(name_or_path: str) -> PreTrainedConfig:
    """The configuration of a model, without network.

    Args:
        name_or_path: a directory with a `config.json`, such a file, or a hub name whose files are in the local cache.

    Raises:
        ValueError: there is none, or transformers does not know its kind of model.
    """
    from transformers import AutoConfig

    path = Path(name_or_path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(
            f"the directory {name_or_path} has no config.json; give that of a Hugging Face model as --model"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoConfig.from_pretrained(name_or_path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        if path.exists():
            reason = str(error).strip().split("\n")[0]
            raise ValueError(f"{name_or_path} is no configuration that transformers can read: {reason}") from error
        raise ValueError(
            f"no model '{name_or_path}': it is neither a directory nor a config.json here, nor in the local cache of "
            "the hub; download its config.json first (nothing is downloaded by this command)"
        ) from error
