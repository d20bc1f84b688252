"""The way of checkpoints to the disk and back: in which format, on which ranks, now or in a thread of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from typing_extensions import override

from lightning_seq1f1b.runtime.together import failing_together
from lightning_seq1f1b.strategy.checkpoint_files import CheckpointFiles
from lightning_seq1f1b.strategy.cut_module import CutModule
from lightning_seq1f1b.strategy.processes import PipelineProcesses
from lightning_seq1f1b.strategy.sharded_writing import Shards
from lightning_seq1f1b.strategy.whole_files import put_back


class PipelineStorage(PipelineProcesses):
    """The part of a strategy that writes and opens checkpoints, and knows nothing of what is in them.

    Args:
        num_stages: stages of one replica; None for all processes.
        backend: of torch.distributed; None to choose by the device.
        timeout: how long a rank waits for another one.

    Attributes:
        state_dict_type: "full" for checkpoints of one file, "sharded" for directories; both can be loaded.
    """

    state_dict_type: Literal["full", "sharded"] = "full"

    def __init__(self, num_stages: int | None, backend: str | None, timeout: timedelta) -> None:
        super().__init__(num_stages, backend, timeout)
        self._cut: CutModule | None = None
        self._files = CheckpointFiles()
        self._running = False

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads files: ours, that of the user's plugins, or a plugin around ours."""
        if self._checkpoint_io is None:
            self._checkpoint_io = self._files
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = self._files  # kept by Lightning's class where it has one already
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def _plugins(self) -> Iterator[CheckpointIO]:
        """What stands between the strategy and the files, the innermost last."""
        io: CheckpointIO | None = self.checkpoint_io
        while io is not None:
            yield io
            io = io.checkpoint_io if isinstance(io, _WrappingCheckpointIO) else None

    @override
    def setup_environment(self) -> None:
        """Connect the processes; what cannot write the chosen format is refused."""
        *_, innermost = self._plugins()
        if self.state_dict_type == "sharded" and innermost is not self._files:
            raise ValueError(
                f"state_dict_type='sharded' is written by torch.distributed.checkpoint, not by "
                f"{type(innermost).__name__}: leave that plugin out, or choose state_dict_type='full'"
            )
        super().setup_environment()
        self._running = True

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write what Lightning has collected, on all ranks together: one file on rank 0, or every rank's own part.

        Raises:
            OSError: on all ranks, when one cannot write, with its reason. Whatever had the name before still has it.
            TypeError: for `storage_options`, unless a plugin of the user's takes them.
        """
        self._check_together()
        assert self._cut is not None
        filepath, sharded = self.broadcast(filepath), self.state_dict_type == "sharded"
        everyone, what = self._process_groups.everyone, f"saving {filepath}"
        with failing_together(everyone, "saving an earlier checkpoint", "rank"):
            self._files.raise_kept()
        *around, innermost = self._plugins()
        later = innermost is self._files and any(isinstance(plugin, AsyncCheckpointIO) for plugin in around)
        if sharded:
            if storage_options is not None or not _is_local_file_protocol(filepath):
                raise TypeError(
                    "state_dict_type='sharded' writes directories of a local or shared file system and takes no "
                    f"storage_options, but was given {filepath} and {storage_options!r}"
                )
            shards = Shards.of(checkpoint, list(self._cut.shapes), everyone)
            if later:
                self._files.expect()
            shards = shards.copied() if around else shards
            self.checkpoint_io.save_checkpoint(shards.handed_over(self._process_groups.saving), filepath)
        else:
            with failing_together(everyone, what, "rank"):
                if self.is_global_zero:
                    if later:
                        self._files.expect()
                    self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        if not self._running:
            self._finish_saving()

    def _finish_saving(self) -> None:
        """Wait for what threads are still writing, and raise on all ranks what one of them has met."""
        with failing_together(self._process_groups.everyone, "saving a checkpoint", "rank"):
            self.checkpoint_io.teardown()
            self._files.raise_kept()

    @override
    def teardown(self) -> None:
        """End a run, once what threads were still writing is written."""
        self._running = False
        if not self._broken and self._groups is not None:
            self._finish_saving()
        super().teardown()
        try:
            self._files.raise_kept()
        except Exception as error:  # the run has failed already, for another reason
            print(f"rank {self.global_rank} could not write a checkpoint: {error}", file=sys.stderr, flush=True)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Open a checkpoint of either format; tensors are read when it is known which ones are needed here.

        Raises:
            Exception: on all ranks, when one cannot read it: says which file it is, and what is wrong with it.
        """
        torch.cuda.empty_cache()
        path = self.broadcast(checkpoint_path)
        everyone, what = self._process_groups.everyone, f"loading {path}"
        local = _is_local_file_protocol(path)
        with failing_together(everyone, what, "rank"):
            if local and self.is_global_zero:
                put_back(Path(path))
        self._files.verifies = self.local_rank == 0
        with failing_together(everyone, what, "rank"):
            io = self._files if local and Path(path).is_dir() else self.checkpoint_io
            return io.load_checkpoint(path, weights_only=weights_only)

    def _check_together(self) -> None:
        if self._broken and self.topology.world_size > 1:
            raise RuntimeError("nothing can be saved after a failed step: the ranks stand at different places")
