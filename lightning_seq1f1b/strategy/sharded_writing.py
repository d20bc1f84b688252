"""A checkpoint as a directory that every rank writes its own tensors to, with torch.distributed.checkpoint.

Beside torch's files (`.metadata`, `*.distcp`), which hold all tensors under the names of the whole module, stands one
small file with everything else, as Lightning's own sharded checkpoints have it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_seq1f1b.runtime.together import Failure, failing_together
from lightning_seq1f1b.strategy.cut_module import SameAs
from lightning_seq1f1b.strategy.whole_files import WholeDirectory, new_job, systems_errors, whole_file

REST = "meta.pt"
"""The file with all that is no tensor of module or optimizer; Lightning's name for it."""

LAYOUT = "seq1f1b_sharded"
"""The entry of that file that says how the tensors belong together."""

VERSION = 1


SHARDS, GROUP = "shards", "group"
"""The entries of what is given to a CheckpointIO in place of a checkpoint."""


class Shards:
    """What one rank writes of a checkpoint; made by `Shards.of`.

    Attributes:
        tensors: nested dicts that end in tensors; "state_dict" by name, "optimizer_0" and so on by "state" and name.
        rest: everything else, on rank 0; empty elsewhere.
    """

    def __init__(self, tensors: dict[str, Any], rest: dict[str, Any]) -> None:
        self.tensors, self.rest = tensors, rest

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any], order: Sequence[str], group: dist.ProcessGroup) -> Shards:
        """Sort a checkpoint, of which each rank has its own part; on all ranks together. Tensors stay where they are.

        Args:
            checkpoint: what Lightning has collected here.
            order: of the whole module's state dict.
            group: a CPU group of all ranks; what is no tensor goes over it to the first one.
        """
        state, states = _once(checkpoint["state_dict"]), checkpoint.get("optimizer_states")
        tensors: dict[str, Any] = {"state_dict": _tensors(state)}
        others: list[dict[str, dict[str, Any]]] = []
        for index, each in enumerate(states or []):
            by_name = {name: _tensors(entries) for name, entries in each["state"].items()}
            by_name = {name: entries for name, entries in by_name.items() if entries}
            tensors[f"optimizer_{index}"] = {"state": by_name} if by_name else {}
            others.append({name: _others(entries) for name, entries in each["state"].items()})
        own = (list(state), _others(state), others)
        everyone: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
        dist.gather_object(own, everyone, group=group, group_dst=0)
        tensors = {name: entries for name, entries in tensors.items() if entries}
        if everyone is None:
            return cls(tensors, {})
        keys = {key for names, _, _ in everyone for key in names}
        entries = {key: value for _, values, _ in everyone for key, value in values.items()}
        layout: dict[str, Any] = {
            "version": VERSION,
            "keys": [*(key for key in order if key in keys), *sorted(keys.difference(order))],
            "same_as": {key: value.name for key, value in entries.items() if isinstance(value, SameAs)},
            "values": {key: value for key, value in entries.items() if not isinstance(value, SameAs)},
        }
        if states is not None:
            layout["optimizers"] = [
                {"param_groups": each["param_groups"], "state": _merged([of[index] for _, _, of in everyone])}
                for index, each in enumerate(states)
            ]
        places = {key: None for key in ("state_dict", "optimizer_states") if key in checkpoint}
        return cls(tensors, {**checkpoint, **places, LAYOUT: layout})

    def copied(self) -> Shards:
        """The same with copies of all tensors, on the CPU: training goes on while they are written."""
        return Shards(_copied(self.tensors), copy.deepcopy(self.rest))

    def handed_over(self, group: dist.ProcessGroup) -> dict[str, Any]:
        """What is given to a CheckpointIO in place of a checkpoint.

        Args:
            group: a CPU group of all ranks for the writing.
        """
        return {SHARDS: self, GROUP: group}


def write_shards(shards: Shards, path: Path, group: dist.ProcessGroup) -> None:
    """Write the directory; on all ranks together. It takes the place of whatever has its name, once all is in it.

    Args:
        shards: this rank's.
        path: the same on all ranks, on a file system that they share.
        group: a CPU group of all ranks that nothing else uses meanwhile.

    Raises:
        OSError: on all ranks, when one cannot write, with its reason; what had the name before still has it.
    """
    rank, what = dist.get_rank(group), f"saving {path}"
    job = [new_job()]
    dist.broadcast_object_list(job, group_src=0, group=group)
    place = WholeDirectory.replacing(path, job[0])
    try:
        with failing_together(group, what, "rank"):
            if rank == 0:
                place.make()
        with failing_together(group, what, "rank"):
            if not place.aside.is_dir():
                raise OSError(f"{path.parent} is not the same directory on all nodes: save to a shared one")
        _write_tensors(shards.tensors, place.aside, group, what)
        with failing_together(group, what, "rank"):
            if rank == 0:
                with whole_file(place.aside / REST) as file:
                    torch.save(shards.rest, file)
                place.finish()
    except BaseException:
        if rank == 0:
            place.drop()
        raise


def _write_tensors(tensors: dict[str, Any], directory: Path, group: dist.ProcessGroup, what: str) -> None:
    try:
        dcp.save(tensors, storage_writer=_Writer(directory), process_group=group)
    except dcp.CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        own = failed.failures.get(dist.get_rank(group))
        if own is not None:
            raise own[0] from None
        if not isinstance(error, Exception):
            raise RuntimeError(f"{what} failed on rank {rank}: {error!r}") from None
        raise Failure.of(error).error(f"{what} failed on rank {rank}") from None


class _Writer(dcp.FileSystemWriter):
    """Raises the system's own error, and notes no path of this machine in the files."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with systems_errors():
            return super().write_data(plan, planner)

    def storage_meta(self) -> StorageMeta | None:
        meta = super().storage_meta()
        return meta and replace(meta, checkpoint_id=None)


def _once(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict in which one tensor under several names stands under the first, and the others refer to it."""
    first: dict[tuple[Any, ...], str] = {}
    once = dict(state)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel():
            name = first.setdefault((value.data_ptr(), value.dtype, value.shape, value.stride()), key)
            once[key] = value if name == key else SameAs(name)
    return once


def _tensors(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value.detach() for key, value in entries.items() if isinstance(value, Tensor)}


def _others(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if not isinstance(value, Tensor)}


def _merged(parts: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {name: dict(entries) for part in parts for name, entries in part.items()}


def _copied(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.to("cpu", copy=True) if isinstance(value, Tensor) else _copied(value)
        for key, value in entries.items()
    }
