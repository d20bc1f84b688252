"""Moves activations and gradients between neighbouring pipeline ranks."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seq1f1b.runtime.topology import Lanes

FORWARD, BACKWARD = "forward", "backward"

_NOT_HERE = {2: (torch.int16, 0x7FA5), 4: (torch.int32, 0x7FA5A5A5), 8: (torch.int64, 0x7FF5A5A5A5A5A5A5)}
"""By item size: bits, a NaN of every floating dtype, that mark the end of a buffer until a message overwrites it."""


class Arrival(Protocol):
    """A message on its way."""

    def is_here(self) -> bool:
        """Whether `wait` would return without much of a wait. A guess, for choosing what to do first."""
        ...

    def wait(self) -> Tensor:
        """Block until the message is here, and return it."""
        ...


class Departure(Protocol):
    """A message that was sent."""

    def wait(self) -> None:
        """Block until it has left, and let go of its tensor."""
        ...


class Transport(Protocol):
    """Point-to-point messages within one pipeline; those of one direction from one rank to another keep their order."""

    def send(self, tensor: Tensor, destination: int, direction: str) -> Departure:
        """Start sending to a pipeline rank without blocking.

        The tensor is kept alive until the departure was waited for, or everything at `finish`.
        """
        ...

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, direction: str) -> Arrival:
        """Start receiving from a pipeline rank without blocking."""
        ...

    def finish(self) -> None:
        """Block until everything sent has left."""
        ...


class ProcessTransport:
    """Messages between processes through torch.distributed (gloo, NCCL).

    Args:
        ranks: global ranks of the pipeline, by pipeline rank.
        groups: process groups of each direction.
        device: where received tensors are made.
    """

    def __init__(self, ranks: Sequence[int], groups: Mapping[str, Lanes], device: torch.device) -> None:
        self._ranks, self._groups, self._device = ranks, groups, device
        self._rank = ranks.index(dist.get_rank())
        self._leaving: list[_ProcessDeparture] = []

    def send(self, tensor: Tensor, destination: int, direction: str) -> Departure:
        """See `Transport.send`."""
        self._leaving = [departure for departure in self._leaving if not departure.is_over()]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._ranks[destination], group=self._group(direction, self._rank, destination))
        assert work is not None
        departure = _ProcessDeparture(work, tensor)
        self._leaving.append(departure)
        return departure

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, direction: str) -> Arrival:
        """See `Transport.receive`."""
        # Made outside inference mode, or validation's buffers could not take part in autograd.
        with torch.inference_mode(False):
            buffer = torch.empty(tuple(shape), dtype=dtype, device=self._device)
            end = None if self._device.type != "cpu" else _mark_end(buffer)
        work = dist.irecv(buffer, self._ranks[source], group=self._group(direction, source, self._rank))
        assert work is not None
        return _ProcessArrival(work, buffer, end)

    def finish(self) -> None:
        """See `Transport.finish`."""
        for departure in self._leaving:
            departure.wait()
        self._leaving.clear()

    def _group(self, direction: str, source: int, destination: int) -> dist.ProcessGroup:
        lanes = self._groups[direction]
        return lanes.up if source < destination else lanes.down


class _ProcessDeparture:
    def __init__(self, work: dist.Work, tensor: Tensor) -> None:
        self._work = work
        self._kept: Tensor | None = tensor

    def is_over(self) -> bool:
        # gloo's work says so only once it was waited for.
        return self._kept is None or self._work.is_completed()

    def wait(self) -> None:
        if self._kept is not None:
            self._work.wait()
            self._kept = None


class _ProcessArrival:
    def __init__(self, work: dist.Work, buffer: Tensor, end: Tensor | None) -> None:
        self._work, self._buffer, self._end = work, buffer, end

    def is_here(self) -> bool:
        # gloo's work is completed only once it was waited for. But gloo fills the buffer from its start to its end, and
        # whoever uses the data waits for them in any case.
        return self._work.is_completed() or (self._end is not None and not _is_marked(self._end))

    def wait(self) -> Tensor:
        self._work.wait()
        return self._buffer


def _mark_end(buffer: Tensor) -> Tensor:
    """Mark the last element of a buffer that is about to be received into, and return it as an integer."""
    dtype, bits = _NOT_HERE[buffer.itemsize]
    return buffer.view(-1)[-1].view(dtype).fill_(bits)


def _is_marked(end: Tensor) -> bool:
    return bool(end.item() == _NOT_HERE[end.itemsize][1])


class _Letter:
    """A message in a mailbox, and its own departure."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.received = threading.Event()

    def wait(self) -> None:
        # Nothing would block here between processes either: a departure is waited for only when it must be over.
        if not self.received.is_set():
            raise RuntimeError("waited for a message that its receiver has not taken yet")


class _Channel:
    """Messages from one rank to another in one direction, numbered by their order on both sides."""

    def __init__(self) -> None:
        self._letters: dict[int, _Letter] = {}
        self._sent = self._expected = 0
        self._changed = threading.Condition()

    def put(self, letter: _Letter) -> None:
        with self._changed:
            self._letters[self._sent] = letter
            self._sent += 1
            self._changed.notify_all()

    def expect(self) -> int:
        """The number of the next message that was not expected yet."""
        self._expected += 1
        return self._expected - 1

    def has(self, number: int) -> bool:
        with self._changed:
            return number in self._letters

    def take(self, number: int, timeout_s: float) -> _Letter:
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._letters, timeout_s):
                raise TimeoutError(f"no message within {timeout_s} s")
            return self._letters.pop(number)


class Mailbox:
    """The in-process counterpart of the process groups: a channel for each (source, destination, direction)."""

    def __init__(self) -> None:
        self._channels: dict[tuple[int, int, str], _Channel] = {}
        self._lock = threading.Lock()

    def channel(self, source: int, destination: int, direction: str) -> _Channel:
        """The messages of one kind from one rank to another."""
        with self._lock:
            return self._channels.setdefault((source, destination, direction), _Channel())


class InProcessTransport:
    """Messages between threads of one process, for tests and for memory counts without process groups.

    Args:
        mailbox: shared by all pipeline ranks.
        pipeline_rank: whose end this is.
        timeout_s: seconds after which a receive raises `TimeoutError`, so that a fault never hangs a test.
    """

    def __init__(self, mailbox: Mailbox, pipeline_rank: int, timeout_s: float = 60.0) -> None:
        self._mailbox, self._rank, self._timeout_s = mailbox, pipeline_rank, timeout_s

    def send(self, tensor: Tensor, destination: int, direction: str) -> Departure:
        """See `Transport.send`. A copy travels, as between processes."""
        letter = _Letter(tensor.clone())
        self._mailbox.channel(self._rank, destination, direction).put(letter)
        return letter

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, direction: str) -> Arrival:
        """See `Transport.receive`."""
        return _InProcessArrival(self._mailbox.channel(source, self._rank, direction), shape, dtype, self._timeout_s)

    def finish(self) -> None:
        """Nothing to wait for: messages leave at once."""


class _InProcessArrival:
    def __init__(self, channel: _Channel, shape: Sequence[int], dtype: torch.dtype, timeout_s: float) -> None:
        self._channel, self._shape, self._dtype, self._timeout_s = channel, shape, dtype, timeout_s
        self._number = channel.expect()

    def is_here(self) -> bool:
        return self._channel.has(self._number)

    def wait(self) -> Tensor:
        letter = self._channel.take(self._number, self._timeout_s)
        letter.received.set()
        tensor = letter.tensor
        if tuple(tensor.shape) != tuple(self._shape) or tensor.dtype != self._dtype:
            expected, came = (tuple(self._shape), self._dtype), (tuple(tensor.shape), tensor.dtype)
            raise RuntimeError(f"expected a message of {expected}, received one of {came}")
        return tensor
