"""What a program leaves on the machine when it should be gone: processes, listening ports, shared memory."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Collection, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

PROC = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
_LISTENING = "0A"


def new_mark() -> str:
    """Mark this process, so that all that it starts from now on can be told from everybody else's processes.

    The mark is the name of an environment variable. Every descendant inherits it, whoever its parent is in the end, and
    shows it in /proc; this process itself does not, because its own environment was laid down when it started.
    """
    forkserver.ensure_running()  # without the mark: multiprocessing keeps it until this process ends
    mark = f"SEQ1F1B_MARK_{uuid.uuid4().hex[:12]}"
    os.environ[mark] = "1"
    return mark


def marked(mark: str) -> dict[int, str]:
    """Command lines of the living processes with a mark, by process id."""
    name = f"{mark}=".encode()

    def has_mark(process: Path) -> bool:
        return any(each.startswith(name) for each in (process / "environ").read_bytes().split(b"\0"))

    return _processes(has_mark)


def own_servers() -> set[int]:
    """Processes that multiprocessing keeps beside this one until it ends, to start others and to clean up."""
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid} - {None}


def of_sessions(sessions: Collection[int]) -> dict[int, str]:
    """Command lines of the living processes of some sessions, by process id.

    A process that leads a session passes it on to all that it starts, a DataLoader's workers for instance.
    """
    return _processes(lambda process: int(_status(process)[3]) in sessions)


def listening(pid: int | str = "self") -> set[int]:
    """TCP ports that a process listens on."""
    sockets = set()
    with contextlib.suppress(OSError):
        for handle in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(handle)
                if target.startswith("socket:["):
                    sockets.add(target[len("socket:[") : -1])
    return {port for port, inode in _listeners() if inode in sockets}


def listened_to(port: int) -> bool:
    """Whether any process of the machine listens on a TCP port."""
    return any(each == port for each, _ in _listeners())


def shared_memory() -> set[str]:
    """Names of all entries of shared memory."""
    with contextlib.suppress(OSError):
        return {entry.name for entry in SHARED_MEMORY.iterdir()}
    return set()


def abandoned(names: Collection[str]) -> set[str]:
    """Those of some entries of shared memory that exist, and that no living process uses: nobody will remove them."""
    names = set(names) & shared_memory()
    if not names:
        return set()
    used: set[str] = set()
    for process in _folders():
        with contextlib.suppress(OSError):
            maps = (process / "maps").read_text()
            used |= {name for name in names if str(SHARED_MEMORY / name) in maps}
        with contextlib.suppress(OSError):
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used |= {Path(os.readlink(handle)).name} & names
    return names - used


def _processes(belongs: Callable[[Path], bool]) -> dict[int, str]:
    found = {}
    for process in _folders():
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            if _status(process)[0] not in "ZX" and belongs(process):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(process.name)] = command.strip()[:300]
    return found


def _folders() -> Iterator[Path]:
    return (each for each in PROC.iterdir() if each.name.isdigit())


def _status(process: Path) -> list[str]:
    """State, parent, process group and session of a process, and more."""
    # The name of the program before it, in parentheses, may contain anything.
    return (process / "stat").read_text().rpartition(") ")[2].split()


def _listeners() -> Iterator[tuple[int, str]]:
    """Port and inode of every listening TCP socket."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (PROC / "self" / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    yield int(fields[1].rpartition(":")[2], 16), fields[9]
