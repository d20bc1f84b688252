"""Runs a command as a user would, and always ends all the processes that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """What a command left: its exit status and everything it printed."""

    status: int
    output: str


def run_command(
    command: Sequence[str | Path], cwd: Path, timeout_s: float = 200.0, **environment: str | Path
) -> Finished:
    """Run a command in `cwd`, with this Python first on the path and this checkout importable.

    Args:
        command: program and arguments.
        cwd: working directory, which gets the logs.
        timeout_s: seconds after which its processes are killed and the test fails.
        environment: variables to set besides.
    """
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {name: str(value) for name, value in environment.items()}
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": search, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{command} did not end in {timeout_s} s; it printed:\n{output}") from error
    return Finished(process.returncode, output)


def succeed(command: Sequence[str | Path], cwd: Path, timeout_s: float = 200.0, **environment: str | Path) -> str:
    """Run a command that must end with status 0; returns what it printed."""
    finished = run_command(command, cwd, timeout_s, **environment)
    assert finished.status == 0, finished.output
    return finished.output
