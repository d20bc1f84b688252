"""Connections between the processes of a job, by which each learns at once that another has gone, and hears news.

They are apart from torch.distributed: its collectives hang where one process does, and its store ends or stops with the
process that hosts it. What the system says of a connection needs nothing of the process at its other end: the
connection of a process that was killed is closed at once, and that of a process that is stopped, or busy in a call
that holds Python's interpreter, stays open.

Every rank keeps one connection to rank 0. All else goes over connections that are made for it, to any rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from lightning_seq1f1b.strategy.local_process import Process

Message = dict[str, Any]
HUB = 0

_VANISHED_AFTER = (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000))
"""Seconds, tries and milliseconds after which the system gives up a connection to a machine that does not answer."""


@dataclass(frozen=True)
class _Place:
    address: str
    port: int
    process: Process


class Line:
    """One end of a connection, which carries lines of JSON."""

    def __init__(self, connection: socket.socket, rank: int | None) -> None:
        connection.setblocking(False)
        self.connection, self.rank, self.is_lifeline, self.awaits_answer = connection, rank, False, False
        self._came, self._leaving, self._lock = b"", b"", threading.Lock()

    def send(self, data: bytes) -> None:
        """Send a line, or as much of it as goes now; the rest goes before the next one."""
        with self._lock, contextlib.suppress(OSError):
            self._leaving += data
            self._leaving = self._leaving[self.connection.send(self._leaving) :]

    def receive(self) -> tuple[list[Message], bool]:
        """What has come, and whether the other end is still there."""
        is_open = True
        try:
            data = self.connection.recv(1 << 16)
            is_open = bool(data)
            self._came += data
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            is_open = False
        *lines, self._came = self._came.split(b"\n")
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):
                messages.append(json.loads(line))
        return messages, is_open


class Lifelines:
    """The connections of one process; made by all processes together.

    Args:
        store: where the processes find each other.
        rank: this process.
        world_size: all processes.
        address: of rank 0's machine, as the others reach it.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, address: str) -> None:
        self.rank, self.world_size = rank, world_size
        self._selector = selectors.PollSelector()  # not epoll, which a forked process would share with this one
        self._listener = _listen()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._lines: list[Line] = []
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        # A program may connect its processes again, with the same store.
        times = store.add(f"seq1f1b_lifelines/times/{rank}", 1)
        store = dist.PrefixStore(f"seq1f1b_lifelines/{times}", store)
        port, process = self._listener.getsockname()[1], Process.this()
        if rank == HUB:
            store.set("token", secrets.token_hex(16))
        self._token = store.get("token").decode()
        if rank != HUB:
            hub = _place(store.get(str(HUB)))
            connection = socket.create_connection((hub.address, hub.port), timeout=60)
            address = connection.getsockname()[0]
            self._add(connection, HUB).is_lifeline = True
            self._lines[0].send(self._packed({"what": "lifeline"}))
        store.set(str(rank), json.dumps(asdict(_Place(address, port, process))))
        names = [str(each) for each in range(world_size)]
        self._places = [_place(value) for value in store.multi_get(names)]
        _close_in_forks(self)

    def close(self) -> None:
        """Close everything: to the others this process has gone."""
        for each in (self._listener, self._wake, self._woken, *(line.connection for line in self._lines)):
            with contextlib.suppress(OSError):
                each.close()

    def process_of(self, rank: int) -> Process:
        """Which process of which machine a rank is."""
        return self._places[rank].process

    def wake(self) -> None:
        """End a `wait` of another thread."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    @property
    def wake_handle(self) -> int:
        """A file handle for `signal.set_wakeup_fd`: `wait` tells the numbers that the system writes to it."""
        return self._wake.fileno()

    def wait(self, timeout_s: float) -> Iterator[tuple[Line, Message | None]]:
        """What has come within a time, each message with its line; None for the end of a rank's lifeline.

        Signals come as messages of this process to itself.
        """
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._woken:
                numbers = [number for number in self._woken.recv(1 << 16) if number]
                if numbers:
                    yield Line(self._woken, self.rank), {"what": "signals", "numbers": numbers}
                continue
            if key.fileobj is self._listener:
                with contextlib.suppress(OSError):
                    connection, _ = self._listener.accept()
                    self._add(connection, None)
                continue
            line: Line = key.data
            messages, is_open = line.receive()
            for message in messages:
                if message.get("token") != self._token:
                    is_open = False
                    break
                line.rank = message["from"]
                line.is_lifeline |= message["what"] == "lifeline"
                yield line, message
            if not is_open:
                self._drop(line)
                if line.is_lifeline:
                    yield line, None

    def answer(self, line: Line, message: Message) -> None:
        """Send a message back over the line on which another one came."""
        line.send(self._packed(message))

    def keep_informed(self, message: Message, *, if_answered: bool = False) -> None:
        """Send a message over the lifelines, from any thread.

        Args:
            message: for the rank at the other end.
            if_answered: leave out those whose `awaits_answer` is set, and set it: whoever does not read is sent no
                more, or the connection would be full and the system would close it.
        """
        for line in list(self._lines):
            if line.is_lifeline and not (if_answered and line.awaits_answer):
                line.awaits_answer |= if_answered
                line.send(self._packed(message))

    def tell(self, message: Message, ranks: Collection[int] | None = None, timeout_s: float = 2.0) -> set[int]:
        """Send a message to other ranks, from any thread; returns the ranks whose processes have gone."""
        connected, gone = self._dial(self._others(ranks), timeout_s)
        for connection in connected.values():
            with contextlib.suppress(OSError):
                connection.settimeout(timeout_s)
                connection.sendall(self._packed(message))
            connection.close()
        return gone

    def ask(self, message: Message, timeout_s: float = 1.0) -> set[int]:
        """Send a message to all other ranks, whose answers come to `wait`; returns the ranks that have gone."""
        connected, gone = self._dial(self._others(None), timeout_s)
        for rank, connection in connected.items():
            self._add(connection, rank).send(self._packed(message))
        return gone

    def gone(self, timeout_s: float = 1.0) -> set[int]:
        """The ranks whose processes are not there any more."""
        connected, gone = self._dial(self._others(None), timeout_s)
        for connection in connected.values():
            connection.close()
        return gone

    def _others(self, ranks: Collection[int] | None) -> list[int]:
        return [rank for rank in (range(self.world_size) if ranks is None else ranks) if rank != self.rank]

    def _packed(self, message: Message) -> bytes:
        return json.dumps({**message, "from": self.rank, "token": self._token}).encode() + b"\n"

    def _add(self, connection: socket.socket, rank: int | None) -> Line:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _VANISHED_AFTER:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        line = Line(connection, rank)
        self._lines.append(line)
        self._selector.register(connection, selectors.EVENT_READ, line)
        return line

    def _drop(self, line: Line) -> None:
        self._selector.unregister(line.connection)
        self._lines.remove(line)
        line.connection.close()

    def _dial(self, ranks: Collection[int], timeout_s: float) -> tuple[Mapping[int, socket.socket], set[int]]:
        """Connections to ranks; and those of which the machine says that nobody listens there any more."""
        connected: dict[int, socket.socket] = {}
        gone: set[int] = set()
        deadline = time.monotonic() + timeout_s
        with selectors.PollSelector() as pending:
            for rank in ranks:
                place = self._places[rank]
                with contextlib.suppress(OSError):
                    info = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0]
                    connection = socket.socket(info[0], info[1])
                    connection.setblocking(False)
                    connection.connect_ex(info[4])
                    pending.register(connection, selectors.EVENT_WRITE, rank)
            while pending.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in pending.select(left):
                    connection = key.fileobj  # type: ignore[assignment]  # it is what was registered
                    pending.unregister(connection)
                    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if not error:
                        connected[key.data] = connection
                        continue
                    connection.close()
                    if isinstance(_error(error), ConnectionRefusedError):
                        gone.add(key.data)
            for key in list(pending.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]  # a socket
        return connected, gone


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    else:
        listener = socket.create_server(("", 0), backlog=1024)
    listener.setblocking(False)
    return listener


def _place(value: bytes) -> _Place:
    fields = json.loads(value)
    return _Place(fields["address"], fields["port"], Process(**fields["process"]))


def _close_in_forks(lifelines: Lifelines) -> None:
    """A forked process, such as a DataLoader's worker, must not keep this one's connections open when it is gone."""
    known = weakref.ref(lifelines)

    def close() -> None:
        if (here := known()) is not None:
            here.close()

    os.register_at_fork(after_in_child=close)
