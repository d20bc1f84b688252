"""Lets go of sent tensors as soon as something received proves that they have arrived.

gloo tells whether a message has left only to who waits for it, and waiting for one that has not would block. The plan
knows better: what a rank receives was computed from, or after, what it has sent.
"""

from __future__ import annotations

from collections import deque

from lightning_seq1f1b.runtime.transport import Departure
from lightning_seq1f1b.schedule.actions import Action, Kind, Unit
from lightning_seq1f1b.schedule.plan import Plan


class Departures:
    """The messages of one rank in one step that may still be on their way.

    - The gradient that comes back for a unit was computed from the activation sent for it.
    - The previous stage sends the activation of a unit after every backward that its order puts before that forward,
      and each of these backwards has taken the gradient sent for it.

    What no receive proves, such as the gradients of the cool-down or a forward-only step, stays until the step's end.

    Args:
        plan: what all ranks execute.
    """

    def __init__(self, plan: Plan) -> None:
        self._activations: dict[tuple[int, Unit], Departure] = {}
        self._gradients: dict[int, deque[Departure]] = {}
        self._released: dict[int, int] = {}
        self._backwards_before = _backwards_before_forwards(plan)

    def add(self, send: Action, departure: Departure) -> None:
        """Remember a message: `send` is its SEND_F or SEND_B."""
        if send.kind is Kind.SEND_F:
            self._activations[send.stage, send.unit] = departure
        else:
            self._gradients.setdefault(send.stage, deque()).append(departure)

    def release(self, receive: Action) -> None:
        """Let go of what the arrival of `receive`, a RECV_F or RECV_B, proves to have arrived."""
        if receive.kind is Kind.RECV_B:
            self._activations.pop((receive.stage, receive.unit)).wait()
            return
        taken = self._backwards_before[receive.stage - 1, receive.unit]
        sent = self._gradients.get(receive.stage, deque())
        for _ in range(taken - self._released.get(receive.stage, 0)):
            sent.popleft().wait()
        self._released[receive.stage] = taken


def _backwards_before_forwards(plan: Plan) -> dict[tuple[int, Unit], int]:
    """For every forward, how many backwards of its stage come before it."""
    before: dict[tuple[int, Unit], int] = {}
    for compute in plan.compute:
        done: dict[int, int] = {}
        for action in compute:
            if action.kind is Kind.F:
                before[action.stage, action.unit] = done.get(action.stage, 0)
            else:
                done[action.stage] = done.get(action.stage, 0) + 1
    return before
