"""The store where the processes of a job meet, with nothing in it of processes that an agent has started before."""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

POLL_S = 0.02


def open_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store that process groups are made with, from the usual environment variables.

    Under torchrun it is the agent's, which outlives the processes that it restarts; else rank 0 hosts it.
    """
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.PrefixStore(agree_on_start(store, rank, world_size, timeout), store)
    return store


def agree_on_start(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that all processes of this start share, and no earlier start has had; called by all of them.

    The number of restarts would not do: agents of several nodes count on their own. Rank 0 draws the name, and gives it
    to every rank that asks under a number which that rank has drawn, so that no rank takes an answer to an earlier one.

    Args:
        store: the same for all starts.
        rank: this process.
        world_size: all processes.
        timeout: how long to wait for the others.

    Raises:
        TimeoutError: on rank 0, when some have not asked in time; on the others torch's own error.
    """
    own = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asks/{rank}", own)
        start = store.get(f"answers/{own}").decode()
        store.add(f"joined/{start}", 1)
        return start
    answered: dict[int, bytes] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    while store.add(f"joined/{own}", 0) < world_size - 1:
        for other in range(1, world_size):
            # What an earlier start has left there is answered too, and read by nobody.
            if store.check([f"asks/{other}"]) and (asked := store.get(f"asks/{other}")) != answered.get(other):
                store.set(f"answers/{asked.decode()}", own)
                answered[other] = asked
        if time.monotonic() > deadline:
            raise TimeoutError(f"of {world_size} processes some have not come within {timeout}")
        time.sleep(POLL_S)
    return own
