"""The files of a model for `from_pretrained`, written from any part of its state dict."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int], None]
"""Told how many bytes of how many have been written."""


def stored_state(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names, and in the pieces, that transformers gives them on the disk.

    Ties are left out, and conversions undone that joined tensors of the file in memory, such as a layer's experts.

    Args:
        model: to whose class the conversions belong.
        state: some entries of its state dict, whole layers.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    left_out = model._keys_to_ignore_on_save or ()
    kept = {name: tensor for name, tensor in state.items() if name not in left_out}
    reverted: dict[str, Tensor] = revert_weight_conversion(model, remove_tied_weights_from_state_dict(kept, model))
    return reverted


def write_shards(
    state: Mapping[str, Tensor], directory: Path, max_shard_size: int | str, progress: Progress | None = None
) -> list[tuple[Path, list[str]]]:
    """Write safetensors files, each of its size at most unless a single tensor is larger.

    Args:
        state: from `stored_state`.
        directory: where; the files' names are preliminary, see `name_shards`.
        max_shard_size: bytes, as a number or like "5GB".
        progress: told after every file.

    Returns:
        Every file and the names of the tensors in it.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    split = split_torch_state_dict_into_shards(
        dict(state), filename_pattern="part{suffix}.safetensors", max_shard_size=max_shard_size
    )
    total = sum(tensor.nbytes for tensor in state.values())
    written, shards = 0, []
    for name, keys in split.filename_to_tensors.items():
        tensors = {key: state[key].contiguous() for key in keys}
        save_file(tensors, directory / name, metadata={"format": "pt"})
        written += sum(tensor.nbytes for tensor in tensors.values())
        shards.append((directory / name, keys))
        if progress is not None:
            progress(written, total)
    return shards


def name_shards(shards: Sequence[tuple[Path, Sequence[str]]], directory: Path, total_size: int) -> None:
    """Give files of weights the names that `from_pretrained` looks for, and an index if there are several.

    Args:
        shards: all files of a model and the names of the tensors in each, in order.
        directory: where they are moved to, on the same file system.
        total_size: bytes of all tensors.
    """
    weight_map: dict[str, str] = {}
    for number, (file, keys) in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        file.replace(directory / name)
        weight_map |= dict.fromkeys(keys, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_configs(model: PreTrainedModel, directory: Path) -> None:
    """Write the config, with the model's class and dtype, and the generation config."""
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
