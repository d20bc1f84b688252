"""Mixes forwards and backwards by what is there when a rank is free: for caps that the fixed mix cannot keep well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning_seq1f1b.schedule.codes import W
from lightning_seq1f1b.schedule.play import Clock, Durations
from lightning_seq1f1b.schedule.timeline import Time
from lightning_seq1f1b.schedule.unit_orders import UnitOrders


class Taste(NamedTuple):
    """What a rank prefers when it could do several things.

    Attributes:
        first: forwards, backwards, or the one that it has not run last.
        makes_room: whether it runs a weight gradient, and so frees a unit, when the forward that it would run next does
            not fit under its cap; else it goes on with a backward.
    """

    first: Literal["forward", "backward", "alternate"]
    makes_room: bool


TASTES = tuple(
    Taste(first, makes_room) for first in ("alternate", "forward", "backward") for makes_room in (False, True)
)


def mix(orders: UnitOrders, durations: Durations, caps: Sequence[int], taste: Taste) -> list[list[int]] | None:
    """Codes of F and B, or F and I, of every rank in the order in which a greedy play runs them; None if it stalls.

    Args:
        orders: the order of the forwards and that of the backwards, which are kept.
        durations: times of the actions.
        caps: the most units that each rank may hold.
        taste: what to prefer.
    """
    greedy = _Greedy(orders, durations, caps, taste)
    rows: list[list[int]] = [[] for _ in caps]
    for rank, code, _, _ in greedy.run().actions:
        if code & 7 != W:
            rows[rank].append(code)
    return rows if all(len(row) == 2 * orders.length for row in rows) else None


class _Greedy(Clock):
    def __init__(self, orders: UnitOrders, durations: Durations, caps: Sequence[int], taste: Taste) -> None:
        super().__init__(len(caps), orders.stage_to_rank, orders.codes, durations, 0)
        self.caps, self.taste = caps, taste
        # Reversed, so that the next one is popped from the end.
        self.forwards = [orders.forwards(rank)[::-1] for rank in range(len(caps))]
        self.backwards = [orders.backwards(rank)[::-1] for rank in range(len(caps))]
        self.last_was_forward = [False] * len(caps)

    def go_on(self, rank: int, now: Time) -> None:
        while True:
            forward, forward_ready = self.next_of(self.forwards[rank], rank, now)
            backward, backward_ready = self.next_of(self.backwards[rank], rank, now)
            full = self.held[rank] >= self.caps[rank]
            wants_forward = self.wants_forward(rank)
            if forward_ready and full and self.owed[rank] and wants_forward and self.taste.makes_room:
                now = self.run_weight_grad(rank, now)
            elif forward_ready and not full and (wants_forward or not backward_ready):
                now = self.run_action(rank, forward, now)
                self.forwards[rank].pop()
                self.last_was_forward[rank] = True
            elif backward_ready:
                now = self.run_action(rank, backward, now)
                self.backwards[rank].pop()
                self.last_was_forward[rank] = False
            elif self.owed[rank]:
                now = self.run_weight_grad(rank, now)
            else:
                self.wait(rank, now, ([] if full else [forward]) + [backward])
                return
            if self.others_first(rank, now):
                return

    def wants_forward(self, rank: int) -> bool:
        if self.taste.first == "alternate":
            return not self.last_was_forward[rank]
        return self.taste.first == "forward"

    def next_of(self, row: list[int], rank: int, now: Time) -> tuple[int, bool]:
        """The next action of a row, or -1, and whether it could run now."""
        if not row:
            return -1, False
        ready, missing = self.ready(row[-1])
        return row[-1], missing is None and ready <= now

    def wait(self, rank: int, now: Time, candidates: Sequence[int]) -> None:
        """Come back when one of the candidates is ready, or when what it lacks has begun."""
        self.free_at[rank] = now
        for code in candidates:
            if code < 0:
                continue
            ready, missing = self.ready(code)
            if missing is None:
                self.wake(rank, ready)
            elif rank not in self.sleeping[missing]:
                self.sleeping[missing].append(rank)
