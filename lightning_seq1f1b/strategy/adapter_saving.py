"""Adapters of a cut model in peft's own format: peft itself writes them, on one rank, from the tensors of all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_seq1f1b.strategy.adapters import adapter_configs, peft_model_around
from lightning_seq1f1b.strategy.cut_module import CutModule

Gather = Callable[[dict[str, Any]], "dict[str, Any] | None"]
"""Brings named tensors of all pipeline ranks to the first one; None elsewhere. See `gathering.gather_to_first`."""


def save_adapters(
    cut: CutModule,
    directory: str | Path,
    gather: Gather,
    control: dist.ProcessGroup,
    *,
    adapters: Sequence[str] | None = None,
) -> None:
    """Write a model's adapters as `save_pretrained` would on one device; to be called on all pipeline ranks.

    `PeftModel.from_pretrained(base, directory)` loads what was written. Only the adapters' tensors travel, so the first
    rank holds these and its own stages, never the whole model.

    Args:
        cut: the module, whose language model has adapters.
        directory: where to write; made where it does not exist. An adapter that is not called "default" gets a folder
            of its own name in it, as with peft.
        gather: brings tensors to the pipeline's first rank.
        control: the group of the pipeline's processes for small messages.
        adapters: names of adapters; all of the model's by default.

    Raises:
        ValueError: when the model has no such adapters.
    """
    configs = adapter_configs(cut.module, cut.model)
    selected = list(configs) if adapters is None else list(adapters)
    missing = [name for name in selected if name not in configs]
    if missing or not selected:
        known = ", ".join(configs) or "none"
        raise ValueError(f"{type(cut.model).__name__} has no adapters {', '.join(missing)} to save; it has {known}")
    holder = peft_model_around(cut.module, cut.model)
    if holder is None:
        raise ValueError(
            f"the adapters of {type(cut.model).__name__} were added by its own add_adapter; adapters of a model on "
            "stages are saved where peft.get_peft_model has made them"
        )
    prefix = next(f"{name}." if name else "" for name, module in cut.module.named_modules() if module is holder)
    wanted: list[Any] = [None]
    if cut.topology.pipeline_rank == 0:
        with cut.whole():
            wanted = [_names_of(holder, selected)]
    dist.broadcast_object_list(wanted, cut.topology.pipeline_ranks[0], group=control)
    here, own = cut.module.state_dict(), cut.own_state()  # of tensors on several ranks, one owns it
    gathered = gather({name: here[prefix + name] for name in wanted[0] if prefix + name in own})
    if gathered is None:
        return
    with cut.whole():
        state = {**nn.Module.state_dict(holder), **gathered}
        type(holder).save_pretrained(holder, str(directory), selected_adapters=selected, state_dict=state)


def _names_of(holder: nn.Module, selected: Sequence[str]) -> list[str]:
    """The names, in the state dict of what holds the adapters, of what peft saves with them."""
    from peft import get_peft_model_state_dict

    state = nn.Module.state_dict(holder)
    saved: set[int] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft says the same again when it writes
        for adapter in selected:
            chosen = get_peft_model_state_dict(holder, state_dict=state, adapter_name=adapter)
            saved.update(map(id, chosen.values()))
    return [name for name, value in state.items() if id(value) in saved]
