"""Lets go of sent tensors as soon as something received proves that they have arrived.

gloo tells whether a message has left only to who waits for it, and waiting for one that has not would block. The plan
knows better: what a rank receives was computed from, or after, what it has sent.
"""

from __future__ import annotations

from collections.abc import Iterator

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
        rank: which of its ranks this is.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self._activations: dict[tuple[int, Unit], Departure] = {}
        self._gradients: dict[tuple[int, Unit], Departure] = {}
        self._orders: dict[int, _PreviousStage] = {}
        own = [stage for stage, place in enumerate(plan.stage_to_rank) if place == rank and stage > 0]
        for neighbour in {plan.stage_to_rank[stage - 1] for stage in own} - {rank}:
            actions = plan.actions_of(neighbour)
            for stage in own:
                if plan.stage_to_rank[stage - 1] == neighbour:
                    self._orders[stage] = _PreviousStage([a for a in actions if a.stage == stage - 1])

    def add(self, send: Action, departure: Departure) -> None:
        """Remember a message: `send` is its SEND_F or SEND_B."""
        messages = self._activations if send.kind is Kind.SEND_F else self._gradients
        messages[send.stage, send.unit] = departure

    def release(self, receive: Action) -> None:
        """Let go of what the arrival of `receive`, a RECV_F or RECV_B, proves to have arrived."""
        if receive.kind is Kind.RECV_B:
            self._activations.pop((receive.stage, receive.unit)).wait()
            return
        for unit in self._orders[receive.stage].newly_taken(receive.unit):
            self._gradients.pop((receive.stage, unit)).wait()


class _PreviousStage:
    """The order of forwards and backwards on the stage before one of ours."""

    def __init__(self, actions: list[Action]) -> None:
        self._backwards = [action.unit for action in actions if action.kind in (Kind.B, Kind.I)]
        self._before: dict[Unit, int] = {}
        self._released = done = 0
        for action in actions:
            if action.kind is Kind.F:
                self._before[action.unit] = done
            elif action.kind in (Kind.B, Kind.I):
                done += 1

    def newly_taken(self, forward: Unit) -> Iterator[Unit]:
        """Units whose gradients were taken before a forward, except those that an earlier forward has told of."""
        while self._released < self._before[forward]:
            self._released += 1
            yield self._backwards[self._released - 1]
