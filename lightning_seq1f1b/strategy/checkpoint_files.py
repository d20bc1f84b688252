"""How the strategy's checkpoints get to the disk: whole or not at all, at once or in a thread of Lightning's plugin."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

from lightning_seq1f1b.strategy.checkpoint_reading import read_checkpoint
from lightning_seq1f1b.strategy.sharded_reading import open_sharded
from lightning_seq1f1b.strategy.sharded_writing import GROUP, SHARDS, write_shards
from lightning_seq1f1b.strategy.whole_files import remove, whole_file

MOST_WAITING = 2
"""Checkpoints in memory that wait for being written; a third one has to wait."""


class CheckpointFiles(TorchCheckpointIO):
    """Reads and writes checkpoints of both formats; what is no local path is left to Lightning's class.

    Attributes:
        verifies: whether files of full checkpoints are compared with their checksums; of processes that read the same
            file, one is enough.
    """

    verifies = True

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting = 0
        self._removals: list[tuple[int, _PATH]] = []  # after how many checkpoints that wait, and what
        self._error: BaseException | None = None
        self._newest: Path | None = None

    def expect(self) -> None:
        """Be told that a thread will write the next checkpoint; waits while too many do already.

        Until then nothing that would make room for it is removed, and an error of the thread is kept.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting < MOST_WAITING)
            self._waiting += 1

    def raise_kept(self) -> None:
        """Raise the error that a thread had, if it had one."""
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write a checkpoint: one file, or on all ranks together a directory.

        Raises:
            OSError: it cannot be written; whatever had its name still has it. In a thread, the error is kept.
        """
        with self._changed:
            expected = self._waiting > 0
        error: BaseException | None = None
        try:
            self._save(checkpoint, path, storage_options)
        except BaseException as raised:
            if not expected:
                raise
            error = raised
        if expected:
            self._done(error)

    def _save(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None) -> None:
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            if SHARDS in checkpoint:
                write_shards(checkpoint[SHARDS], Path(path), checkpoint[GROUP])
            else:
                with whole_file(Path(path)) as file:
                    torch.save(checkpoint, file)
        except OSError as error:
            if error.errno is None:  # it is another rank's, and says all
                raise
            raise OSError(error.errno, f"the checkpoint {path} cannot be written: {error.strerror}") from error
        self._newest = Path(path)

    def _done(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = self._error or error
            due = [path for after, path in self._removals if after == 1]
            self._removals = [(after - 1, path) for after, path in self._removals if after > 1]
            if self._error is not None:
                due, self._removals = [], []  # nothing takes their place
        for path in due:
            self._remove(path)
        with self._changed:
            self._waiting -= 1
            self._changed.notify_all()

    @override
    def load_checkpoint(
        self, path: _PATH, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint of either format, without executing anything in it unless `weights_only` is False."""
        safely = weights_only is None or weights_only
        if not _is_local_file_protocol(path):
            return super().load_checkpoint(path, map_location or (lambda storage, _: storage), safely)
        if Path(path).is_dir():
            return open_sharded(Path(path), safely)
        return read_checkpoint(Path(path), safely, verify=self.verifies)

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Remove a file or directory; once a thread has written what replaces it, if that is what it does now."""
        with self._changed:
            if self._waiting and self._error is None:
                self._removals.append((self._waiting, path))
            now = not self._waiting and self._error is None
        if now:
            self._remove(path)

    def _remove(self, path: _PATH) -> None:
        if _is_local_file_protocol(path):
            remove(Path(path), self._newest)
        else:
            super().remove_checkpoint(path)
