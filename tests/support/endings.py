"""Runs a program that fails on several processes, and tells how all of them end."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes import free_port, job_environment


@dataclass(frozen=True)
class Ending:
    """How the processes of a program ended.

    Attributes:
        statuses: exit status by rank; negative for a signal.
        seconds: from the moment the program said it fails to the end of the last process.
        output: what all processes printed, in its order.
    """

    statuses: list[int]
    seconds: float
    output: str


def seconds_since_failure(output: str) -> float:
    """Time since the program said that it fails."""
    said = re.search(r"fails at ([\d.]+)", output)
    assert said, output
    return time.time() - float(said.group(1))


def run_to_the_end(program: Callable[..., None], world_size: int, path: Path, *args: Any) -> Ending:
    """Run `program(*args)` on processes that end as Python's do: an error is printed, then what `atexit` has is run.

    Args:
        program: importable by name.
        world_size: number of processes.
        path: a file for what they print.
        args: the same for all.
    """
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    processes = [
        context.Process(target=_main, args=(program, rank, world_size, port, str(path), args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(60)
        output = path.read_text()
        return Ending([process.exitcode for process in processes], seconds_since_failure(output), output)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _main(
    program: Callable[..., None], rank: int, world_size: int, port: int, path: str, args: tuple[Any, ...]
) -> None:
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
