"""A process as others of its machine know it, so that one that does not answer any more can be ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """Names one process, and no later one with the same number.

    Attributes:
        machine: of which process numbers are told.
        number: the process id.
        born: when it started, in the machine's own measure; "" where that cannot be known.
    """

    machine: str
    number: int
    born: str

    @classmethod
    def this(cls) -> Process:
        """The calling process."""
        return cls(_machine(), os.getpid(), _born(os.getpid()))

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine, and is still the process that it was."""
        return bool(self.born) and self.machine == _machine() and _born(self.number) == self.born

    def kill(self) -> None:
        """End it at once, if it is on this machine."""
        if self.is_here:
            with contextlib.suppress(OSError):
                os.kill(self.number, signal.SIGKILL)


def _machine() -> str:
    """The machine's start and its table of processes, of which there may be several on it."""
    with contextlib.suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    return socket.gethostname()


def _born(number: int) -> str:
    with contextlib.suppress(OSError):
        # The name, in parentheses, may contain anything; the start is the 20th field behind it.
        return (_PROC / str(number) / "stat").read_text().rpartition(")")[2].split()[19]
    return ""
