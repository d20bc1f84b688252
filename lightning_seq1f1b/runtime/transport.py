"""Moves activations and gradients between neighbouring pipeline ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

FORWARD, BACKWARD = "forward", "backward"


class Arrival(Protocol):
    """A message on its way."""

    def wait(self) -> Tensor:
        """Block until the message is here, and return it."""
        ...


class Departure(Protocol):
    """A message that was sent."""

    def wait(self) -> None:
        """Block until it has left, and let go of its tensor."""
        ...


class Transport(Protocol):
    """Point-to-point messages within one pipeline; messages of one direction between two ranks keep their order."""

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
        groups: process group of each direction.
        device: where received tensors are made.
    """

    def __init__(self, ranks: Sequence[int], groups: dict[str, dist.ProcessGroup], device: torch.device) -> None:
        self._ranks, self._groups, self._device = ranks, groups, device
        self._leaving: list[_ProcessDeparture] = []

    def send(self, tensor: Tensor, destination: int, direction: str) -> Departure:
        """See `Transport.send`."""
        self._leaving = [departure for departure in self._leaving if not departure.is_over()]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._ranks[destination], group=self._groups[direction])
        assert work is not None
        departure = _ProcessDeparture(work, tensor)
        self._leaving.append(departure)
        return departure

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, direction: str) -> Arrival:
        """See `Transport.receive`."""
        # Made outside inference mode, or validation's buffers could not take part in autograd.
        with torch.inference_mode(False):
            buffer = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        work = dist.irecv(buffer, self._ranks[source], group=self._groups[direction])
        assert work is not None
        return _ProcessArrival(work, buffer)

    def finish(self) -> None:
        """See `Transport.finish`."""
        for departure in self._leaving:
            departure.wait()
        self._leaving.clear()


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
    def __init__(self, work: dist.Work, buffer: Tensor) -> None:
        self._work, self._buffer = work, buffer

    def wait(self) -> Tensor:
        self._work.wait()
        return self._buffer


class _Letter:
    """A message in a mailbox, and its own departure."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.received = threading.Event()

    def wait(self) -> None:
        # Nothing would block here between processes either: a departure is waited for only when it must be over.
        if not self.received.is_set():
            raise RuntimeError("waited for a message that its receiver has not taken yet")


class Mailbox:
    """The in-process counterpart of the process groups: one queue for each (source, destination, direction)."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int, str], queue.Queue[_Letter]] = {}
        self._lock = threading.Lock()

    def queue(self, source: int, destination: int, direction: str) -> queue.Queue[_Letter]:
        """The queue of one channel, made at its first use."""
        with self._lock:
            return self._queues.setdefault((source, destination, direction), queue.Queue())


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
        self._mailbox.queue(self._rank, destination, direction).put(letter)
        return letter

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, direction: str) -> Arrival:
        """See `Transport.receive`."""
        return _InProcessArrival(self._mailbox.queue(source, self._rank, direction), shape, dtype, self._timeout_s)

    def finish(self) -> None:
        """Nothing to wait for: messages leave at once."""


class _InProcessArrival:
    def __init__(
        self, channel: queue.Queue[_Letter], shape: Sequence[int], dtype: torch.dtype, timeout_s: float
    ) -> None:
        self._channel, self._shape, self._dtype, self._timeout_s = channel, shape, dtype, timeout_s

    def wait(self) -> Tensor:
        try:
            letter = self._channel.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no message within {self._timeout_s} s") from None
        letter.received.set()
        tensor = letter.tensor
        if tuple(tensor.shape) != tuple(self._shape) or tensor.dtype != self._dtype:
            expected, came = (tuple(self._shape), self._dtype), (tuple(tensor.shape), tensor.dtype)
            raise RuntimeError(f"expected a message of {expected}, received one of {came}")
        return tensor
