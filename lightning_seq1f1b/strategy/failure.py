"""The first failure of any rank reaches all ranks, so that the user's own traceback is what everyone prints last."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from datetime import timedelta

import torch.distributed as dist

POLL_S = 0.5
GRACE_S = 10.0
"""How long a rank may take to end by itself after another one has failed, before it is ended."""

_FAILURE, _SEEN = "failure", "seen"
_HOST_GONE = "rank 0, which hosts the store of all ranks, has gone without a word: it was killed"


class FailureBoard:
    """Where a failing rank writes its traceback, and every other rank reads it.

    It watches during a run (one call of fit, validate, test or predict) and rests in between, when a rank that does
    not answer may simply have finished.

    Args:
        store: the store the process groups were made with.
        rank: this process.
        world_size: all processes.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._main_store = store
        self._watch_store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._rank, self._world_size = rank, world_size
        self._runs = 0
        self._run: _Run | None = None

    def open(self) -> None:
        """Start to watch; called by all ranks at the start of a run."""
        self.close()
        self._runs += 1
        # Every run has keys of its own: an earlier failure that the program has survived is not this run's.
        prefix = f"seq1f1b_failure/{self._runs}"
        main, watch = (dist.PrefixStore(prefix, store) for store in (self._main_store, self._watch_store))
        self._run = _Run(main, watch, self._rank, self._world_size)

    def report(self, exception: BaseException, where: str) -> None:
        """Tell the others about this rank's exception, or complete it with the one that caused it.

        When another rank failed first, this rank's exception is only a consequence (a closed connection, usually). The
        first failure's traceback is then added to it, so that whichever rank prints last prints the cause.

        Args:
            exception: what is about to end this rank.
            where: what this rank was doing, in words.
        """
        if self._run is None:
            return
        own = f"rank {self._rank} ({where}) failed first:\n\n{''.join(traceback.format_exception(exception))}"
        first = self._run.publish(own)
        same = "".join(traceback.format_exception_only(exception)).strip() in first
        if not same:
            _add(exception, first)
        self.close()

    def close(self) -> None:
        """End the watch; called at the end of a run."""
        if self._run is not None:
            self._run.close()
            self._run = None


class _Run:
    """One run's place on the board, and the thread that watches it."""

    def __init__(self, main_store: dist.Store, watch_store: dist.Store, rank: int, world_size: int) -> None:
        self._main_store, self._watch_store = main_store, watch_store
        self._rank, self._world_size = rank, world_size
        self._found: str | None = None
        self._noticed, self._closed = threading.Event(), threading.Event()
        self._acknowledging, self._acknowledged = threading.Lock(), False
        self._thread = threading.Thread(target=self._watch, name="seq1f1b-failure-watch", daemon=True)
        self._thread.start()

    def publish(self, own: str) -> str:
        """Write a failure unless there is one already; the first one is returned."""
        try:
            first = self._main_store.compare_set(_FAILURE, "", own).decode()
            self._acknowledge(self._main_store)
            if first == own:
                self._linger()
            return first
        except dist.DistError:
            # The store ends with its host, which published before it left, and the watch has read that. A host that was
            # killed published nothing; then this rank's own exception is all there is to say.
            self._noticed.wait(2 * POLL_S)
            return self._found or own

    def close(self) -> None:
        self._closed.set()
        # A thread that asked a store that is about to end would write its complaints below the user's traceback.
        self._thread.join(4 * POLL_S)

    def _acknowledge(self, store: dist.Store) -> None:
        with self._acknowledging:
            if not self._acknowledged:
                self._acknowledged = True
                store.add(_SEEN, 1)

    def _linger(self) -> None:
        """Stay until the others have read the report: this rank may host the store."""
        deadline = time.monotonic() + 4 * POLL_S
        while time.monotonic() < deadline and self._main_store.add(_SEEN, 0) < self._world_size:
            time.sleep(0.05)

    def _watch(self) -> None:
        try:
            while not self._watch_store.check([_FAILURE]):
                if self._closed.wait(POLL_S):
                    return
            self._found = self._watch_store.get(_FAILURE).decode()
            self._noticed.set()
            self._acknowledge(self._watch_store)
        except Exception:
            if self._found is None:
                self._found = _HOST_GONE
        if not self._closed.wait(GRACE_S):
            # The main thread does not come back: it computes, or waits for a message that will never arrive.
            # In one write, line end included: other ranks say the same at the same moment.
            sys.stderr.write(f"rank {self._rank} is ended, because {self._found}\n")
            sys.stderr.flush()
            os._exit(1)


def _add(exception: BaseException, cause: str) -> None:
    if sys.version_info >= (3, 11):
        exception.add_note(f"\n{cause}")
    else:
        exception.args = (f"{type(exception).__name__}: {exception}\n\n{cause}",)


def open_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store that process groups are made with, from the usual environment variables.

    Under torchrun it is the agent's; else rank 0 hosts it.
    """
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return store
