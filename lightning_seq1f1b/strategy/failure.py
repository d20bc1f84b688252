"""The first failure of any rank reaches all ranks, so that the user's own traceback is what everyone prints last."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch.distributed as dist

_KEY, _SEEN = "failure", "failure_seen"
POLL_S = 0.5
GRACE_S = 10.0
"""How long a rank may take to end by itself after another one has failed, before it is ended."""


class FailureBoard:
    """Where a failing rank writes its traceback, and every other rank reads it.

    Args:
        store: the store the process groups were made with.
        rank: this process.
        world_size: all processes.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = dist.PrefixStore("seq1f1b_failure", store)
        self._rank, self._world_size = rank, world_size
        self._found: str | None = None
        self._published = self._stopped = False
        self._changed = threading.Condition()
        threading.Thread(target=self._watch, name="seq1f1b-failure-watch", daemon=True).start()

    def report(self, exception: BaseException, where: str) -> None:
        """Tell the others about this rank's exception, or complete it with the one that caused it.

        When another rank failed first, this rank's exception is only a consequence (a closed connection, usually). Its
        message then becomes the first failure's traceback, so that whichever rank prints last prints the cause.

        Args:
            exception: what is about to end this rank.
            where: what this rank was doing, in words.
        """
        text = f"rank {self._rank} ({where}) failed first:\n\n{''.join(traceback.format_exception(exception))}"
        try:
            first = self._store.compare_set(_KEY, "", text).decode()
            if first == text:
                self._published = True
                self._linger()
        except dist.DistError:
            # The store ends with its host, which published before it left, and the watch has read that. A host that was
            # killed published nothing; then this rank's own exception is all there is to say.
            first = self._wait_for_watch() or text
        if first != text:
            exception.args = (f"{type(exception).__name__}: {exception}\n\n{first}",)
        self.stop()

    def stop(self) -> None:
        """End the watch."""
        self._stopped = True

    def _wait_for_watch(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._found is not None, timeout=2 * POLL_S)
        return self._found

    def _linger(self) -> None:
        """Stay until the others have read the report: this rank may host the store."""
        deadline = time.monotonic() + 4 * POLL_S
        while time.monotonic() < deadline and self._store.add(_SEEN, 0) < self._world_size - 1:
            time.sleep(0.05)

    def _watch(self) -> None:
        store = self._store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        try:
            while not self._stopped:
                if store.check([_KEY]):
                    break
                time.sleep(POLL_S)
            if self._stopped or self._published:
                return
            with self._changed:
                self._found = store.get(_KEY).decode()
                self._changed.notify_all()
            store.add(_SEEN, 1)
        except Exception:
            return  # the store is gone, and so is its host: the main thread's connections are closed as well
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if self._stopped:
                return
            time.sleep(POLL_S)
        # The main thread does not come back: it computes, or waits for a message that will never arrive.
        print(f"rank {self._rank} is ended, because {self._found}", file=sys.stderr, flush=True)
        os._exit(1)


def open_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store that process groups are made with, from the usual environment variables.

    Under torchrun it is the agent's; else rank 0 hosts it.
    """
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return store
