"""Runs a program that fails on several processes, and tells how all of them end and what they leave."""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.left_behind import listened_to, of_sessions
from support.processes import free_port, job_environment

STARTING_S = 120.0
"""How long a program may take before it says that it fails."""

REAPED_S = 1.0
"""How long after its end a process's status may come: when its last thread has gone."""

_POLL_S = 0.05


@dataclass(frozen=True)
class Ending:
    """How the processes of a program ended.

    Attributes:
        statuses: exit status by rank; negative for a signal, None for a process that had to be ended.
        seconds: from the moment the program said it fails to the end of the last process, those that the ranks started
            included.
        output: what all processes printed, in its order.
        left: what was there when the time was over, in words.
    """

    statuses: list[int | None]
    seconds: float
    output: str
    left: list[str]


def failed_at(output: str) -> float | None:
    """When the program said that it fails; None if it has not."""
    said = re.search(r"fails at ([\d.]+)", output)
    return float(said.group(1)) if said else None


def seconds_since_failure(output: str) -> float:
    """Time since the program said that it fails."""
    said = failed_at(output)
    assert said is not None, output
    return time.time() - said


def run_to_the_end(
    program: Callable[..., None], world_size: int, path: Path, *args: Any, limit_s: float = 60.0
) -> Ending:
    """Run `program(*args)` on processes that end as Python's do: an error is printed, then what `atexit` has is run.

    Args:
        program: importable by name.
        world_size: number of processes.
        path: a file for what they print.
        args: the same for all.
        limit_s: seconds after the failure at which what has not ended is killed, and counts as left.
    """
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    processes = [
        context.Process(target=_main, args=(program, rank, world_size, port, str(path), args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    ids = [process.pid or 0 for process in processes]
    try:
        seconds = await_end(ids, path, limit_s)
        for process in processes:
            process.join(5)  # the status comes a moment after the end
        statuses = [process.exitcode for process in processes]
        left = [f"process {pid}: {command}" for pid, command in of_sessions(ids).items()]
    finally:
        end_sessions(ids)
        for process in processes:
            process.kill()
            process.join()
    if listened_to(port):
        left.append(f"port {port}")
    output = path.read_text()
    assert seconds is not None, f"the program did not fail; statuses {statuses}\n{output}"
    return Ending(statuses, seconds, output, left)


def await_end(sessions: Sequence[int], path: Path, limit_s: float) -> float | None:
    """Wait until no process of some sessions is left, or the time is over.

    Args:
        sessions: ids of the processes that lead them; each has made a session of its own, or will.
        path: the file with what they print.
        limit_s: seconds after the failure.

    Returns:
        Seconds from the failure to the end; None when there was no failure.
    """
    begin = time.time()
    failed = None
    while True:
        gone = not of_sessions(sessions) and not any(_alive(pid) for pid in sessions)
        if failed is None:
            failed = failed_at(path.read_text()) if path.exists() else None
        now = time.time()
        late = now > begin + STARTING_S if failed is None else now > failed + limit_s
        if gone or late:
            return None if failed is None else now - failed
        time.sleep(_POLL_S)


def end_sessions(sessions: Sequence[int]) -> None:
    """Kill what is left of some sessions."""
    for pid in of_sessions(sessions):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def _main(
    program: Callable[..., None], rank: int, world_size: int, port: int, path: str, args: tuple[Any, ...]
) -> None:
    os.setsid()
    # A DataLoader's workers start as they do in an ordinary process, not through a fork server of their own.
    multiprocessing.set_start_method(None, force=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(job_environment(rank, world_size, port))
    status = 0
    try:
        program(*args)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def captured(program: Callable[..., None], *args: Any) -> str:
    """What a program prints from Python while it runs."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        program(*args)
    return printed.getvalue()
