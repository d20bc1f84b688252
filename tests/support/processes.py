"""Runs a function on several connected processes, and always ends them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

# A server that has imported the slow packages forks the processes, so that each starts in milliseconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["lightning.pytorch", "transformers", "lightning_seq1f1b", "support.preload"])


class ProcessFailedError(AssertionError):
    """A process raised, died or did not end in time; the message has every process's traceback."""


def free_port() -> int:
    """A TCP port that nobody listens on, below those the system gives out by itself.

    One of the system's own might be given to somebody else's connection before the processes come to use it.
    """
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def job_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that a launcher sets for one process of a job on one machine."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
    }


def run_processes(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """Call `function(rank, *args)` on `world_size` processes with the environment of a launched job.

    Args:
        function: importable by name; its results must pickle.
        world_size: number of processes.
        args: the same for all.
        timeout_s: seconds for all together, after which they are killed.

    Returns:
        The results, by rank.
    """
    port = free_port()
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        # Not daemons, which could not start a DataLoader's workers.
        process = _CONTEXT.Process(target=_call, args=(theirs, function, rank, world_size, port, args), daemon=False)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    deadline = time.monotonic() + timeout_s
    try:
        outcomes = [_outcome(pipe, deadline) for pipe in pipes]
    finally:
        for process in processes:
            process.join(timeout=max(0.0, min(10.0, deadline - time.monotonic())))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
    failures = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    if failures:
        raise ProcessFailedError("\n\n".join(failures))
    return [result for _, result in outcomes]


def _outcome(pipe: Connection, deadline: float) -> tuple[bool, Any]:
    if not wait([pipe], timeout=max(0.0, deadline - time.monotonic())):
        return False, "did not end in time"
    try:
        return pickle.loads(pipe.recv_bytes())  # type: ignore[no-any-return]
    except EOFError:
        return False, "died without a result"


def _call(
    pipe: Connection, function: Callable[..., Any], rank: int, world_size: int, port: int, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # A DataLoader's workers start as they do in an ordinary process, not through a fork server of their own.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(job_environment(rank, world_size, port))
    try:
        outcome = True, function(rank, *args)
    except BaseException:
        outcome = False, traceback.format_exc()
    # Pickled here: the pipe's own pickler would share tensors' memory with a process that is about to end.
    pipe.send_bytes(pickle.dumps(outcome))
    if dist.is_initialized():
        dist.destroy_process_group()
