"""Files and directories that are whole under their name, or not there: whatever ends the process that writes them.

They are written beside their place, as `.NAME.xxxxxxxx.unfinished`, and get their name in one step. A process that is
killed while it writes leaves that behind, and the next one that writes to the same directory takes it away.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_BESIDE = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.(?P<what>unfinished|previous)")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` when the block ends, and vanishes when the block raises.

    Raises:
        OSError: the file cannot be written; whatever was under its name still is.
    """
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    aside = beside(path, new_job())
    try:
        with open(aside, "xb") as file:
            _mark_in_use(file.fileno())
            with systems_errors():
                yield file
            file.flush()
            os.fsync(file.fileno())
            _put(aside, path)
    except BaseException:
        _delete(aside)
        raise


@contextmanager
def systems_errors() -> Iterator[None]:
    """Inside, an error of torch about a file that it could not write gives way to the system's, which says why."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        if cause is None:
            raise
        raise cause from None


@dataclass
class WholeDirectory:
    """A directory that takes its place once everything is in it.

    Attributes:
        path: its name in the end.
        aside: where it is written, on the same file system.
    """

    path: Path
    aside: Path
    _descriptor: int | None = field(default=None, init=False)

    @classmethod
    def new(cls, path: Path, job: str) -> WholeDirectory:
        """A directory that must not exist yet, or be empty.

        Args:
            path: its name in the end.
            job: what tells this writing of it from others; the same on all ranks.

        Raises:
            ValueError: there is a file by that name, or a directory with something in it.
        """
        path = path.absolute()
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(f"{path} exists already: choose a new or empty directory to save to")
        return cls(path, beside(path, job))

    @classmethod
    def replacing(cls, path: Path, job: str) -> WholeDirectory:
        """A directory that takes the place of whatever has its name; `job` as above."""
        path = path.absolute()
        return cls(path, beside(path, job))

    def make(self) -> None:
        """Make the place aside, on one rank."""
        remove_leftovers(self.path)
        self.aside.mkdir(parents=True)
        self._descriptor = os.open(self.aside, os.O_RDONLY)
        _mark_in_use(self._descriptor)

    def finish(self) -> None:
        """Write everything in it through to the disk and give it its name, on the rank that made it."""
        for folder, _, names in os.walk(self.aside):
            for name in names:
                _sync(Path(folder, name))
            _sync(Path(folder))
        _put(self.aside, self.path)
        self._release()

    def drop(self) -> None:
        """Remove what has been written, if it is not finished."""
        _delete(self.aside)
        self._release()

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def new_job() -> str:
    """Eight characters that tell one writing from others."""
    return uuid.uuid4().hex[:8]


def beside(path: Path, job: str, what: str = "unfinished") -> Path:
    """Where something that belongs to `path` stands meanwhile."""
    # Lightning takes every name with "ckpt_" in it for a numbered checkpoint, whatever else the name says.
    name = path.name.replace("%", "%25").replace("ckpt_", "ckpt%5F")
    return path.with_name(f".{name}.{job}.{what}")


def remove(path: Path, successor: Path | None = None) -> None:
    """Remove a file, a directory or a link; a directory vanishes from under its name in one step.

    Args:
        path: what to remove; nothing happens when it is not there.
        successor: what links named `last...` beside it point to from then on, if they pointed to it.
    """
    if successor is not None:
        _turn_links(path, successor)
    if path.is_dir() and not path.is_symlink():
        aside = beside(path, new_job())
        path.rename(aside)
        path = aside
    _delete(path)


def put_back(path: Path) -> None:
    """Give a checkpoint its name back that a killed process was about to replace, where that takes two steps."""
    for entry, owner, what in _leftovers(path.parent):
        if what == "previous" and owner == path and not os.path.lexists(path):
            entry.rename(path)


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes have left unfinished beside `path`, and put back what they took from its place."""
    for entry, owner, what in _leftovers(path.parent):
        if what == "previous" and not os.path.lexists(owner):
            entry.rename(owner)
        elif not _is_in_use(entry, unless_told=owner != path):
            _delete(entry)


def _leftovers(directory: Path) -> Iterator[tuple[Path, Path, str]]:
    """What stands aside in a directory: its path, the path it belongs to, and what it is."""
    for entry in sorted(directory.glob(".*")):
        if (found := _BESIDE.fullmatch(entry.name)) is not None:
            name = found["name"].replace("ckpt%5F", "ckpt_").replace("%25", "%")
            yield entry, directory / name, found["what"]


def _put(aside: Path, path: Path) -> None:
    """Give `aside` the name, also when something has it that no plain rename replaces."""
    directories = [place.is_dir() and not place.is_symlink() for place in (aside, path)]
    if not os.path.lexists(path) or not any(directories):
        aside.replace(path)
    elif not _exchange(aside, path):
        previous = beside(path, new_job(), "previous")
        path.replace(previous)
        aside.replace(path)
        aside = previous
    _sync(path.parent)
    if os.path.lexists(aside):
        _delete(aside)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot."""
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return exchange is not None and exchange(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0


def _turn_links(path: Path, successor: Path) -> None:
    for link in path.parent.glob("last*"):
        if link.is_symlink() and link.parent / link.readlink() == path:
            aside = beside(link, new_job())
            aside.symlink_to(os.path.relpath(successor, link.parent))
            aside.replace(link)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mark_in_use(descriptor: int) -> None:
    # The system takes the mark away when the process ends, however it ends. Not every file system can.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_in_use(path: Path, *, unless_told: bool) -> bool:
    """Whether a process still writes it; `unless_told` where the file system does not know of marks."""
    if path.is_symlink():
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return unless_told
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return unless_told
    finally:
        os.close(descriptor)
    return False
