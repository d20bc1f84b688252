"""What one rank sends, receives, and hands from stage to stage itself during one step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_seq1f1b.runtime.batching import Microbatch
from lightning_seq1f1b.runtime.departures import Departures
from lightning_seq1f1b.runtime.transport import BACKWARD, FORWARD, Arrival, Transport
from lightning_seq1f1b.runtime.wire import Formats, WireFormat
from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.plan import Plan


class Messages:
    """Activations and gradients between stages, by the SEND and RECV actions they belong to.

    Neighbouring stages on one rank need no message: what one of them gives is taken by the other.

    Args:
        plan: what all ranks execute.
        rank: which of its ranks this is.
        transport: this rank's end of the pipeline.
        formats: what is known of the tensors between the stages; completed here.
        microbatches: the batch, cut.
        device: where the stages compute.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        transport: Transport,
        formats: Formats,
        microbatches: Sequence[Microbatch],
        device: torch.device,
    ) -> None:
        self._stage_to_rank, self._rank = plan.stage_to_rank, rank
        self._transport, self._formats, self._device = transport, formats, device
        self._microbatches = microbatches
        self._departures = Departures(plan, rank)
        self._outgoing: dict[Action, Tensor] = {}
        self._arriving: dict[Action, Arrival] = {}
        self._handed: dict[Action, Tensor] = {}
        self._inboxes: defaultdict[tuple[int, str], _Inbox] = defaultdict(_Inbox)

    def give(self, send: Action, tensor: Tensor) -> None:
        """Leave the tensor of a SEND for that action, or for the next or previous stage where it is on this rank."""
        receive = _receive_of(send)
        if self._stage_to_rank[receive.stage] == self._rank:
            self._handed[receive] = tensor
        else:
            self._outgoing[send] = tensor

    def send(self, action: Action) -> None:
        """Execute a SEND."""
        tensor = self._outgoing.pop(action)
        destination = self._stage_to_rank[_receive_of(action).stage]
        if action.kind is Kind.SEND_F:
            self._announce(action.stage, destination, tensor)
        departure = self._transport.send(tensor, destination, _direction(action))
        self._departures.add(action, departure)

    def receive(self, action: Action) -> None:
        """Execute a RECV: start it, as soon as the tensor's format and its predecessors' are known."""
        inbox = self._inboxes[self._source(action)]
        inbox.unposted.append(action)
        self._post(inbox)

    def is_here(self, receive: Action) -> bool:
        """Whether `take` would return at once."""
        if receive in self._handed:
            return True
        if receive not in self._arriving:
            self._post(self._inboxes[self._source(receive)])
        return receive in self._arriving and self._arriving[receive].is_here()

    def take(self, receive: Action) -> Tensor:
        """The tensor of a RECV; blocks until it is here."""
        if receive in self._handed:
            return self._handed.pop(receive)
        if receive not in self._arriving:
            self._post(self._inboxes[self._source(receive)], needed=receive)
        tensor = self._arriving.pop(receive).wait()
        self._departures.release(receive)
        return tensor

    def left(self) -> list[Action]:
        """Actions whose tensors nobody has taken."""
        waiting = [action for inbox in self._inboxes.values() for action in inbox.unposted]
        return [*self._outgoing, *self._arriving, *self._handed, *waiting]

    def _announce(self, boundary: int, destination: int, tensor: Tensor) -> None:
        """Tell the next stage the format before the first activation, and hold later ones to it."""
        form = WireFormat.of(tensor)
        if boundary not in self._formats:
            self._formats[boundary] = form
            self._transport.send(form.encode(self._device), destination, FORWARD)
        elif self._formats[boundary] != form:
            raise RuntimeError(f"stage {boundary} gave {form}, but announced {self._formats[boundary]}")

    def _post(self, inbox: _Inbox, needed: Action | None = None) -> None:
        """Start receives in their order, as far as formats are known; wait for formats only up to the one `needed`."""
        while inbox.unposted:
            action = inbox.unposted[0]
            source, direction = self._source(action)
            boundary = min(action.stage, _send_of(action).stage)
            if boundary not in self._formats:
                # A gradient has the format of the activation that was sent before it: soon known here.
                if action.kind is Kind.RECV_B:
                    return
                if inbox.announcement is None:
                    inbox.announcement = self._transport.receive((2,), torch.int64, source, FORWARD)
                is_needed = needed is not None and needed not in self._arriving
                if not (is_needed or inbox.announcement.is_here()):
                    return
                self._formats[boundary] = WireFormat.decode(inbox.announcement.wait())
                inbox.announcement = None
            form, microbatch = self._formats[boundary], self._microbatches[action.unit.microbatch]
            shape = (microbatch.rows, microbatch.chunks[action.unit.chunk].span.length, form.hidden_size)
            self._arriving[action] = self._transport.receive(shape, form.dtype, source, direction)
            inbox.unposted.popleft()

    def _source(self, receive: Action) -> tuple[int, str]:
        return self._stage_to_rank[_send_of(receive).stage], _direction(receive)


class _Inbox:
    """Receives from one rank in one direction that were not started yet, oldest first."""

    def __init__(self) -> None:
        self.unposted: deque[Action] = deque()
        self.announcement: Arrival | None = None


def _receive_of(send: Action) -> Action:
    if send.kind is Kind.SEND_F:
        return Action(Kind.RECV_F, send.stage + 1, send.unit)
    return Action(Kind.RECV_B, send.stage - 1, send.unit)


def _send_of(receive: Action) -> Action:
    if receive.kind is Kind.RECV_F:
        return Action(Kind.SEND_F, receive.stage - 1, receive.unit)
    return Action(Kind.SEND_B, receive.stage + 1, receive.unit)


def _direction(action: Action) -> str:
    return FORWARD if action.kind in (Kind.SEND_F, Kind.RECV_F) else BACKWARD
