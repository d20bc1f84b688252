"""`lightning-seq1f1b export`: a checkpoint of `CausalLM` as a Hugging Face directory."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_seq1f1b.cli.causal_lm import CONFIG_KEY
from lightning_seq1f1b.cli.progress import Progress
from lightning_seq1f1b.strategy.checkpoint_reading import read_trusted
from lightning_seq1f1b.strategy.pretrained_files import name_shards, stored_state, write_configs, write_shards
from lightning_seq1f1b.strategy.sharded_reading import open_sharded
from lightning_seq1f1b.strategy.whole_files import WholeDirectory, new_job

MODEL_PREFIX = "model."
"""How `CausalLM` names its model, and so how the names of the model's weights begin in a checkpoint."""


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-seq1f1b export",
        description="Write a checkpoint of CausalLM as a directory for AutoModelForCausalLM.from_pretrained.",
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="a file or directory that the Trainer wrote")
    parser.add_argument("--output", type=Path, required=True, help="the directory to write; new, or empty")
    parser.add_argument(
        "--tokenizer", help="path or name of the tokenizer to put beside it; the one of the training data by default"
    )
    parser.add_argument("--max-shard-size", default="5GB", help="bytes of a file of weights at most (5GB by default)")
    arguments = parser.parse_args(argv)
    progress = Progress("MiB of the weights written")
    try:
        tokenizer = export(
            arguments.checkpoint,
            arguments.output,
            arguments.tokenizer,
            arguments.max_shard_size,
            lambda done, total: progress(done >> 20, total >> 20),
        )
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{arguments.output} cannot be written: {error}")
    print(f"{arguments.output}: model and " + (f"tokenizer of {tokenizer}" if tokenizer else "no tokenizer"))
    return 0


def export(
    checkpoint: Path,
    output: Path,
    tokenizer: str | None = None,
    max_shard_size: int | str = "5GB",
    progress: Callable[[int, int], None] | None = None,
) -> str | None:
    """Write the model in a checkpoint as config, safetensors and tokenizer files.

    Nothing in the file is executed: it is read with `weights_only=True`. The weights keep their dtype. Those of a
    checkpoint of one file stay there until they are written, and memory is needed for one file of weights at a time;
    those of a sharded one are all read first. The directory appears under its name once all is in it.

    Args:
        checkpoint: a checkpoint of `CausalLM`, of one file or sharded.
        output: the directory to write.
        tokenizer: path or name of the tokenizer; by default what `LongDocuments` recorded in the checkpoint.
        max_shard_size: bytes of a file of weights at most, as a number or like "5GB".
        progress: told how many bytes of how many have been written.

    Returns:
        The tokenizer that was written; None when none was given or recorded.

    Raises:
        OSError: The directory cannot be written.
        ValueError: The file is no such checkpoint, a weight is missing, unknown or of another shape, the tokenizer
            cannot be loaded, or the directory has files in it.
    """
    from transformers import AutoTokenizer

    place = WholeDirectory.new(output, new_job())
    content = _read(checkpoint)
    model = _model(content[CONFIG_KEY], content["state_dict"], checkpoint)
    name = tokenizer or content.get("datamodule_hyper_parameters", {}).get("tokenizer")
    if name is not None:
        try:
            loaded = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(f"the tokenizer '{name}' cannot be loaded; give another as tokenizer: {error}") from error
    place.make()
    try:
        if name is not None:
            loaded.save_pretrained(place.aside)
        stored = stored_state(model, model.state_dict())
        size = sum(tensor.nbytes for tensor in stored.values())
        name_shards(write_shards(stored, place.aside, max_shard_size, progress), place.aside, size)
        write_configs(model, place.aside)
        place.finish()
    except BaseException:
        place.drop()
        raise
    return name


def _read(checkpoint: Path) -> Mapping[str, Any]:
    if not checkpoint.exists():
        raise ValueError(f"there is no checkpoint {checkpoint}")
    try:
        # Of neither format the optimizer's state, two thirds of it, is read.
        content = read_trusted(checkpoint, weights_only=True) if checkpoint.is_file() else open_sharded(checkpoint)
    except pickle.UnpicklingError as error:
        # torch's own message recommends to load the file without safety.
        raise ValueError(f"{checkpoint} holds more than tensors and plain values, and is not read") from error
    if not isinstance(content, Mapping) or not {CONFIG_KEY, "state_dict"} <= content.keys():
        raise ValueError(
            f"{checkpoint} was not written by CausalLM: it lacks the entry '{CONFIG_KEY}'. For a module of your own, "
            "load it with its load_from_checkpoint (a directory after lightning-seq1f1b consolidate) and call "
            "save_pretrained on its model"
        )
    return content


def _model(config: Mapping[str, Any], state_dict: Mapping[str, torch.Tensor], checkpoint: Path) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    # On the meta device, so that the checkpoint's tensors become the weights and nothing is held twice.
    with torch.device("meta"):
        model = auto_model.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)))
    weights = {name.removeprefix(MODEL_PREFIX): value for name, value in state_dict.items()}
    try:
        missing, unknown = model.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{checkpoint} does not fit its {config['model_type']} model: {error}") from error
    if missing or unknown:
        raise ValueError(
            f"{checkpoint} does not hold the weights of its {config['model_type']} model: missing {missing}, "
            f"unknown {unknown}"
        )
    # Assigning undid the sharing of tied weights; both names have the same values in the checkpoint.
    model.tie_weights()
    return model
