"""Reads a sharded checkpoint, one tensor at a time, by whoever needs it; nothing in the files is executed."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Container, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_seq1f1b.strategy.checkpoint_reading import read_trusted
from lightning_seq1f1b.strategy.checksums import changed_record
from lightning_seq1f1b.strategy.optimizers import numbered_state
from lightning_seq1f1b.strategy.sharded_writing import LAYOUT, REST, VERSION

TENSORS = ".metadata"
"""Where torch.distributed.checkpoint notes which tensor stands in which file."""

_CLASSES = {
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
    "torch": ("Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",),
}
"""All that torch writes into its file of metadata; none of it does anything but hold values."""


class ShardedCheckpoint:
    """An opened directory.

    Args:
        path: the directory.
        weights_only: read nothing but tensors and plain values from the small file; as `torch.load` takes it.

    Attributes:
        rest: what is no tensor of module or optimizer, as in a checkpoint of one file.
        layout: what joins the tensors to state dicts again.

    Raises:
        ValueError: the directory is no such checkpoint, lacks a file, or one of its files is cut off or damaged.
    """

    def __init__(self, path: Path, weights_only: bool = True) -> None:
        self.path = path
        for name in (REST, TENSORS):
            if not (path / name).is_file():
                raise ValueError(f"the directory {path} is no sharded checkpoint: it has no {name}")
        self.rest: dict[str, Any] = read_trusted(path / REST, weights_only)
        if not isinstance(self.rest, dict) or LAYOUT not in self.rest:
            raise ValueError(
                f"the sharded checkpoint {path} was written by another strategy: its {REST} has no '{LAYOUT}'. Turn it "
                "into one file with the means of that strategy, and load that"
            )
        self.layout: dict[str, Any] = self.rest.pop(LAYOUT)
        if self.layout["version"] > VERSION:
            raise ValueError(f"the sharded checkpoint {path} was written by a later version of lightning-seq1f1b")
        self._metadata = _read_metadata(path / TENSORS)
        self._check_files()
        self._optimizer_names: dict[tuple[int, str], dict[str, str]] = {}
        for stored, (part, *place) in self._metadata.planner_data.items():
            if part != "state_dict":
                _, name, key = place
                self._optimizer_names.setdefault((int(part.removeprefix("optimizer_")), name), {})[key] = stored

    @property
    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Shape of every entry of the module's state dict, in its order; None for what is no tensor."""
        shapes: dict[str, tuple[int, ...] | None] = {}
        for key in self.layout["keys"]:
            stored = self._metadata.state_dict_metadata.get(self._stored_name(key))
            shapes[key] = None if stored is None else tuple(cast(TensorStorageMetadata, stored).size)
        return shapes

    def entry(self, key: str) -> Any:
        """One entry of the module's state dict."""
        if key in self.layout["values"]:
            return self.layout["values"][key]
        name = self._stored_name(key)
        return self._read([name])[name]

    def fill(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Read into the tensors of a state dict what is saved of it; entries that are no tensors are returned."""
        wanted: dict[str, list[Tensor]] = {}
        for key in self.layout["keys"]:
            if isinstance(value := state.get(key), Tensor):
                wanted.setdefault(self._stored_name(key), []).append(value.detach())
        self._read_into({name: first for name, (first, *_) in wanted.items()})
        for first, *others in wanted.values():
            for other in others:
                other.copy_(first)
        return {key: value for key, value in self.layout["values"].items() if key in state}

    def optimizer_entries(self, index: int, name: str) -> dict[str, Any]:
        """The state of one parameter in one optimizer."""
        names = self._optimizer_names.get((index, name), {})
        tensors = self._read(list(names.values()))
        entries = {key: tensors[stored] for key, stored in names.items()}
        return {**entries, **self.layout["optimizers"][index]["state"].get(name, {})}

    def _stored_name(self, key: str) -> str:
        return f"state_dict.{self.layout['same_as'].get(key, key)}"

    def _read(self, names: list[str]) -> dict[str, Tensor]:
        tensors = {}
        for name in names:
            stored = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[name])
            tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        self._read_into(tensors)
        return tensors

    def _read_into(self, tensors: dict[str, Tensor]) -> None:
        self._check_content(tensors)
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load(tensors, storage_reader=_Reader(self.path, self._metadata), planner=planner, no_dist=True)
        except dcp.CheckpointException as failed:
            error, _ = next(iter(failed.failures.values()))
            if isinstance(error, OSError):
                raise error from None
            raise ValueError(f"the sharded checkpoint {self.path} is damaged: its tensors cannot be read") from error

    def _check_content(self, names: Container[str]) -> None:
        """Nothing of some tensors has changed since it was written."""
        for index, stored in self._metadata.storage_data.items():
            if index.fqn in names:
                path = self.path / stored.relative_path
                with path.open("rb") as file:
                    file.seek(stored.offset)
                    content = file.read(stored.length)
                if changed_record(io.BytesIO(content)) is not None:
                    raise ValueError(f"{path} is damaged: {index.fqn} has changed since it was written")

    def _check_files(self) -> None:
        """Every file is here and as long as what stands in it."""
        ends: dict[str, int] = {}
        for stored in self._metadata.storage_data.values():
            name = stored.relative_path
            ends[name] = max(ends.get(name, 0), stored.offset + stored.length)
        for name, end in ends.items():
            file = self.path / name
            if Path(name).name != name:
                raise ValueError(f"the sharded checkpoint {self.path} names a file outside of it: {name}")
            if not file.is_file():
                raise ValueError(f"the sharded checkpoint {self.path} is not whole: its file {name} is missing")
            if (size := file.stat().st_size) < end:
                raise ValueError(f"{file} is cut off: it has {size} bytes of at least {end}")


class SavedState(Mapping[str, Any]):
    """The module's state dict in a sharded checkpoint; an entry is read when it is asked for."""

    def __init__(self, checkpoint: ShardedCheckpoint) -> None:
        self.checkpoint = checkpoint

    def __getitem__(self, key: str) -> Any:
        return self.checkpoint.entry(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint.layout["keys"])

    def __len__(self) -> int:
        return len(self.checkpoint.layout["keys"])


class SavedEntries(Mapping[str, dict[str, Any]]):
    """What an optimizer has saved by parameter name in a sharded checkpoint; read when it is asked for."""

    def __init__(self, checkpoint: ShardedCheckpoint, index: int) -> None:
        self.checkpoint, self.index = checkpoint, index

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.checkpoint.optimizer_entries(self.index, name)

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint.layout["optimizers"][self.index]["state"]

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint.layout["optimizers"][self.index]["state"])

    def __len__(self) -> int:
        return len(self.checkpoint.layout["optimizers"][self.index]["state"])


def open_sharded(path: Path, weights_only: bool = True) -> dict[str, Any]:
    """A checkpoint as Lightning restores it, whose tensors are read when they are asked for.

    Raises:
        ValueError: as `ShardedCheckpoint`.
    """
    opened = ShardedCheckpoint(path, weights_only)
    checkpoint = {**opened.rest, "state_dict": SavedState(opened)}
    if "optimizers" in opened.layout:
        checkpoint["optimizer_states"] = [
            {"state": SavedEntries(opened, index), "param_groups": each["param_groups"]}
            for index, each in enumerate(opened.layout["optimizers"])
        ]
    return checkpoint


def whole_checkpoint(path: Path, weights_only: bool = True) -> dict[str, Any]:
    """All of a sharded checkpoint in memory, as the Trainer writes it into one file.

    Raises:
        ValueError: as `ShardedCheckpoint`.
    """
    opened = ShardedCheckpoint(path, weights_only)
    same_as = opened.layout["same_as"]
    own = {key: opened.entry(key) for key in opened.layout["keys"] if key not in same_as}
    checkpoint = {**opened.rest, "state_dict": {key: own[same_as.get(key, key)] for key in opened.layout["keys"]}}
    if "optimizers" in opened.layout:
        checkpoint["optimizer_states"] = [
            numbered_state(each["param_groups"], SavedEntries(opened, index))
            for index, each in enumerate(opened.layout["optimizers"])
        ]
    return checkpoint


class _Reader(dcp.FileSystemReader):
    """Reads tensors by metadata that have been read already, not by torch's way, which would execute code in them."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _member(kind: Any, name: str) -> Enum:
    """A member of an enumeration; the first releases of Python 3.11 write `getattr` for it."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"it asks for {name} of {kind}, which torch does not write there")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which torch does not write there")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except OSError:
        raise
    except Exception as error:  # random bytes make an unpickler raise whatever there is
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{path} is damaged: it holds no metadata")
    return metadata
