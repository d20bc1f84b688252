"""Writes the model as a Hugging Face directory: every rank its own tensors, none of them the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_seq1f1b.runtime.together import failing_together
from lightning_seq1f1b.strategy.adapter_saving import Gather, save_adapters
from lightning_seq1f1b.strategy.adapters import adapter_configs
from lightning_seq1f1b.strategy.cut_module import CutModule
from lightning_seq1f1b.strategy.pretrained_files import name_shards, stored_state, write_configs, write_shards
from lightning_seq1f1b.strategy.whole_files import WholeDirectory

_WHAT = "saving the model"


def save(cut: CutModule, directory: Path, job: str, gather: Gather, control: dist.ProcessGroup, **options: Any) -> None:
    """Write the model, or the adapters of one that has some; called on all ranks of one replica together.

    Args:
        cut: the module whose language model is saved.
        directory: where; new or empty.
        job: part of the name of the directory until it is finished, the same on all ranks.
        gather: brings tensors to the pipeline's first rank, for adapters.
        control: the group of the pipeline's processes for small messages.
        options: `max_shard_size`, as transformers takes it; `tokenizer`, its path or name or itself, or None.

    Raises:
        OSError: on all ranks, when one cannot write, with its reason. What has been written is removed then.
        ValueError: on all ranks, when there is something in the directory.
    """
    rank = cut.topology.pipeline_rank
    with failing_together(control, _WHAT):
        place = WholeDirectory.new(directory, job)
    try:
        with failing_together(control, _WHAT):
            if rank == 0:
                place.make()
                _save_tokenizer(options["tokenizer"], place.aside)  # first: it is soon done, and may not be found
        with failing_together(control, _WHAT):
            if not place.aside.is_dir():
                raise OSError(f"{place.aside.parent} is not the same directory on all nodes: save to a shared one")
        if adapter_configs(cut.module, cut.model):
            with failing_together(control, _WHAT):
                save_adapters(cut, place.aside, gather, control)
        else:
            _save_model(cut, place.aside, options["max_shard_size"], control)
        with failing_together(control, _WHAT):
            if rank == 0:
                place.finish()
    except BaseException:
        if rank == 0:
            place.drop()
        raise


def _save_model(cut: CutModule, directory: Path, max_shard_size: int | str, control: dist.ProcessGroup) -> None:
    """Every rank writes its shards under preliminary names; the first one gives them their names and an index."""
    topology, model = cut.topology, cut.model
    state = model.state_dict()
    names: list[list[str]] = [[] for _ in range(topology.num_stages)]
    dist.all_gather_object(names, list(state), group=control)
    elsewhere = {name for earlier in names[: topology.pipeline_rank] for name in earlier}
    part = directory / f"rank-{topology.pipeline_rank}"
    shards: list[tuple[Path, list[str]]] = []
    size = 0
    with failing_together(control, _WHAT):
        stored = stored_state(model, {name: state[name] for name in state if name not in elsewhere})
        size = sum(tensor.nbytes for tensor in stored.values())
        part.mkdir()
        shards = write_shards(stored, part, max_shard_size)
    everyone = [(shards, size)] * topology.num_stages
    dist.all_gather_object(everyone, (shards, size), group=control)
    with failing_together(control, _WHAT):
        if topology.pipeline_rank == 0:
            name_shards([shard for each, _ in everyone for shard in each], directory, sum(size for _, size in everyone))
            write_configs(model, directory)
            for rank in range(topology.num_stages):
                (directory / f"rank-{rank}").rmdir()


def _save_tokenizer(tokenizer: Any, directory: Path) -> None:
    if isinstance(tokenizer, (str, Path)):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
