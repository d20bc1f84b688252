"""The first failure of any rank reaches all ranks, so that the user's own traceback is what everyone prints last.

A rank that raises tells the others. One that goes without a word is missed by the system, which closes its connection.
One that neither gets on nor goes is found by those that wait for it, when their patience is at its end.
"""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from lightning_seq1f1b.runtime.position import Position
from lightning_seq1f1b.strategy.forced_end import end_at_once, say, tell_agent
from lightning_seq1f1b.strategy.lifelines import HUB, Lifelines, Line, Message
from lightning_seq1f1b.strategy.stalls import MainThread, Standing, report
from lightning_seq1f1b.strategy.stopping import StopRequests

POLL_S = 0.5
GRACE_S = 10.0
"""How long a rank may take to end by itself after another one has failed, before it is ended."""

STALLED_GRACE_S = 1.0
"""The same after a stall, when no main thread is expected to come back."""

ANSWER_S = 3.0
"""How long a rank may take to tell where it is; its main thread need not take part."""

_CONSEQUENCE_S = 3.0
"""How long a rank with a broken connection waits for news of why it broke."""

_CONNECTION = re.compile(r"gloo|NCCL|TCPStore|[Cc]onnection (closed|reset|was)|[Bb]roken pipe|[Tt]imed out waiting")


@dataclass(frozen=True)
class Cause:
    """Why a run ends.

    Attributes:
        text: for the user.
        silent: ranks that did not answer any more.
        stalled: whether main threads are not expected to come back.
    """

    text: str
    silent: tuple[int, ...] = ()
    stalled: bool = False


@dataclass
class _Run:
    """One call of fit, validate, test or predict."""

    number: int
    position: Position
    patience_s: float
    children: Callable[[], Iterable[subprocess.Popen[bytes]]]
    stopping: StopRequests | None
    main: MainThread
    cause: Cause | None = None
    found_at: float = 0.0
    noticed: threading.Event = field(default_factory=threading.Event)
    missed_at: float | None = None
    asked_at: float | None = None
    standings: dict[int, Standing] = field(default_factory=dict)


class FailureBoard:
    """Where every rank learns of the first failure.

    It watches during a run (one call of fit, validate, test or predict) and rests in between, when a rank that does
    not answer may simply have finished. Made by all ranks together.

    Args:
        store: the store the process groups were made with.
        rank: this process.
        world_size: all processes.
        num_stages: pipeline ranks of one replica; all processes by default.
        address: of rank 0's machine, as the other ranks reach it.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, num_stages: int | None = None, address: str = "127.0.0.1"
    ) -> None:
        self._lines = Lifelines(store, rank, world_size, address)
        self._rank, self._world_size, self._num_stages = rank, world_size, num_stages or world_size
        self._number = 0
        self._run: _Run | None = None
        self._early: dict[int, Cause] = {}
        self._closed: dict[int, int] = {}
        self._lost: set[int] = set()
        self._last_heard: dict[int, tuple[str, float]] = {}
        self._thread: threading.Thread | None = None
        self.failed = False
        self.children: Callable[[], Iterable[subprocess.Popen[bytes]]] = tuple

    def open(
        self,
        position: Position | None = None,
        patience_s: float = float("inf"),
        children: Callable[[], Iterable[subprocess.Popen[bytes]]] = tuple,
        stopping: StopRequests | None = None,
    ) -> None:
        """Start to watch; called by all ranks, on their main threads, at the start of a run.

        Args:
            position: what this process is at.
            patience_s: how long a rank waits for another one.
            children: gives the other ranks that this process has started.
            stopping: what the user asks for by signals.
        """
        self.close()
        self._number += 1
        position = Position() if position is None else position
        main = MainThread(position, threading.get_ident())
        run = _Run(self._number, position, patience_s, children, stopping, main)
        self._run, self.children, self.failed = run, children, False
        if (early := self._early.pop(run.number, None)) is not None:
            self._find(run, early)
        self._thread = threading.Thread(target=self._watch, args=(run,), name="seq1f1b-failure-watch", daemon=True)
        self._thread.start()

    def report(self, exception: BaseException, where: str) -> None:
        """Tell the others about this rank's exception, or complete it with the one that caused it.

        When another rank failed first, this rank's exception is only a consequence (a closed connection, usually). The
        first failure's traceback is then added to it, so that whichever rank prints last prints the cause.

        Args:
            exception: what is about to end this rank.
            where: what this rank was doing, in words.
        """
        run = self._run
        if run is None:
            return
        self.failed = True
        own = Cause(f"rank {self._rank} ({where}) failed first:\n\n{''.join(traceback.format_exception(exception))}")
        if run.cause is None and is_consequence(exception):
            run.noticed.wait(_CONSEQUENCE_S)
        if run.cause is None:
            self._publish(run, own)
        assert run.cause is not None
        text = run.cause.text
        if run.cause is own:
            exception.add_note(f"raised on rank {self._rank} ({where})")
        elif traceback.format_exception_only(exception)[0].strip() not in text:
            exception.add_note(f"\n{text}")
        tell_agent(text)
        self.close()

    def close(self) -> None:
        """End the watch; called at the end of a run."""
        if self._run is not None:
            number, self._run = self._run.number, None
            self._lines.keep_informed({"what": "closed", "run": number})
            self._lines.wake()
            if self._thread is not None:
                self._thread.join(4 * POLL_S)

    def leave(self) -> None:
        """Close the connections; called once, at the end of the process."""
        self.close()
        self._lines.close()

    def who(self, rank: int, stage: int | None = None) -> str:
        """Names a rank, and the stage of its action or else its first: "rank 2 (stage 2 of replica 0)"."""
        own = rank % self._num_stages if stage is None else stage
        return f"rank {rank} (stage {own} of replica {rank // self._num_stages})"

    @property
    def wake_handle(self) -> int:
        """For `signal.set_wakeup_fd`, so that the watch hears of signals even when the main thread hangs."""
        return self._lines.wake_handle

    # ---- the watching thread ---------------------------------------------------------------------------------------

    def _watch(self, run: _Run) -> None:
        pinged = 0.0
        # Of many ranks rank 0 asks each less often where it is.
        pause_s = max(POLL_S, 0.01 * self._world_size)
        while self._run is run:
            with suppress(OSError):
                for line, message in self._lines.wait(POLL_S):
                    self._hear(line, message)
                if self._run is not run:
                    return
                if self._rank == HUB and time.monotonic() - pinged > pause_s:
                    pinged = time.monotonic()
                    self._lines.keep_informed({"what": "ping", "at": str(run.position)}, if_answered=True)
                self._look(run)

    def _look(self, run: _Run) -> None:
        if run.cause is not None:
            if time.monotonic() - run.found_at > (STALLED_GRACE_S if run.cause.stalled else GRACE_S):
                self._end(run, run.cause)
            return
        missed = {rank for rank in self._lost if self._closed.get(rank, 0) < run.number}
        if missed:
            self._miss(run, missed)
            return
        if run.stopping is not None and (number := run.stopping.take_unsent()) is not None:
            self._lines.tell({"what": "signal", "run": run.number, "number": number}, [HUB])
        standing = run.main.look()
        if run.asked_at is not None:
            self._conclude(run)
        elif standing.waits and standing.seconds > run.patience_s:
            run.asked_at = time.monotonic()
            run.standings = {self._rank: standing}
            self._lines.ask({"what": "where", "run": run.number})

    def _hear_all(self) -> None:
        """Whatever has come so far; of a new connection it takes a second look to see what came over it."""
        for _ in range(3):
            for line, message in self._lines.wait(0):
                self._hear(line, message)

    def _hear(self, line: Line, message: Message | None) -> None:
        run, rank = self._run, line.rank
        assert rank is not None
        if message is None:
            self._lost.add(rank)
            return
        what, number = message["what"], message.get("run")
        here = run if run is not None and run.number == number else None
        if what in ("ping", "pong"):
            self._last_heard[rank] = (message["at"], time.monotonic())
            line.awaits_answer = False
            if what == "ping":
                self._lines.answer(line, {"what": "pong", "at": "" if run is None else str(run.position)})
        elif what == "closed":
            self._closed[rank] = message["run"]
        elif what == "failed":
            cause = Cause(message["text"], tuple(message["silent"]), message["stalled"])
            if here is not None:
                self._find(here, cause)
            elif message["run"] > self._number:
                self._early[message["run"]] = cause
        elif what == "where" and here is not None:
            self._lines.answer(line, {"what": "standing", "run": number, "standing": asdict(here.main.look())})
        elif what == "standing" and here is not None:
            here.standings[rank] = Standing(**message["standing"])
        elif what == "signal" and here is not None and here.stopping is not None:
            here.stopping.ask(message["number"])
        elif what == "signals" and run is not None and run.stopping is not None:
            for arrived in message["numbers"]:
                run.stopping.hear(arrived)
            if signal.SIGINT in message["numbers"] and run.stopping.is_impatient():
                text = f"{self.who(self._rank)} was interrupted for a second time"
                self._publish(run, Cause(text, stalled=True))
                end_at_once(text, run.children(), 128 + signal.SIGINT)

    def _miss(self, run: _Run, missed: set[int]) -> None:
        """Some ranks have gone; others may have at the same moment, or have found that and ended."""
        if run.missed_at is None:
            run.missed_at = time.monotonic()
        if time.monotonic() - run.missed_at < POLL_S:
            return
        missed |= self._lines.gone()
        self._hear_all()  # who ended in this time has told why
        if run.cause is not None or self._run is not run:
            return
        many = len(missed) > 1
        names = " and ".join(map(self.who, sorted(missed)))
        last = "".join(
            f". {self.who(rank)} was last heard of{self._last_words(rank)}"
            for rank in sorted(missed)
            if rank in self._last_heard
        )
        text = (
            f"{names} {'have' if many else 'has'} gone without a word: {'they were' if many else 'it was'} killed, "
            f"perhaps for want of memory{last}"
        )
        self._publish(run, Cause(text))
        # At once, because whoever has started these processes may be about to end them all.
        say(text)

    def _last_words(self, rank: int) -> str:
        """Where a rank was when it was last heard of: " 0.4 s before, in the forward of microbatch 0, chunk 1"."""
        if rank not in self._last_heard:
            return ""
        words, when = self._last_heard[rank]
        return f" {time.monotonic() - when:.1f} s before, {words or 'between steps'}"

    def _conclude(self, run: _Run) -> None:
        """All have told where they are, or have had the time."""
        assert run.asked_at is not None
        if len(run.standings) < self._world_size and time.monotonic() - run.asked_at < ANSWER_S:
            return
        silent = {rank: self._last_words(rank) for rank in range(self._world_size) if rank not in run.standings}
        text = report(run.standings, silent, run.patience_s, self.who, self._num_stages)
        self._publish(run, Cause(text, tuple(silent), stalled=True))

    def _publish(self, run: _Run, cause: Cause) -> None:
        message = {"what": "failed", "run": run.number, **asdict(cause)}
        self._find(run, cause)
        self._lines.tell(message)

    def _find(self, run: _Run, cause: Cause) -> None:
        if run.cause is None:
            run.cause, run.found_at = cause, time.monotonic()
            run.noticed.set()

    def _end(self, run: _Run, cause: Cause) -> None:
        """The main thread does not come back: it computes, or waits for a message that will never arrive."""
        for rank in cause.silent:
            if rank != self._rank:
                self._lines.process_of(rank).kill()
        end_at_once(f"rank {self._rank} is ended, because {cause.text}", run.children())


def is_consequence(exception: BaseException | None) -> bool:
    """Whether an exception tells of a broken connection, which it is then likely that another rank has caused."""
    while exception is not None:
        if isinstance(exception, dist.DistError):
            return True
        if isinstance(exception, (RuntimeError, OSError)) and _CONNECTION.search(str(exception)):
            return True
        exception = exception.__cause__
    return False
