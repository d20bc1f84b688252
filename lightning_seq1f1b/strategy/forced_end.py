"""The end of a process whose main thread does not come back: said in one write, with nothing left behind."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

FLUSH_S = 1.0


def say(text: str) -> None:
    """Write to the standard error in one piece: other ranks say the same at the same moment."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text.rstrip()}\n".encode(errors="replace"))


def end_at_once(text: str, children: Iterable[subprocess.Popen[bytes]], status: int = 1) -> NoReturn:
    """End this process and those it has started, from any thread.

    Args:
        text: what is said last; the cause at its end.
        children: other ranks that this process has started. They have had the time to end by themselves.
        status: the exit status.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    for child in children:
        if child.poll() is None:
            child.kill()
    # Of the user's output nothing should be lost. The main thread may hold the stream's lock for ever.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    tell_agent(text)
    say(text)
    os._exit(status)


def tell_agent(text: str) -> None:
    """Leave the cause where torchrun's summary takes it from, unless there is one already."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or Path(path).exists():
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def wait_or_kill(children: Iterable[subprocess.Popen[bytes]], patience_s: float) -> None:
    """Give the ranks that this process has started some time to end by themselves, after a failure."""
    deadline = time.monotonic() + patience_s
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
