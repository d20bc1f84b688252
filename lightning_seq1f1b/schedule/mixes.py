"""Ways to mix the forwards and the backwards of every rank, for any number of microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from lightning_seq1f1b.schedule import greedy
from lightning_seq1f1b.schedule.play import Durations
from lightning_seq1f1b.schedule.policies import mix, warmups
from lightning_seq1f1b.schedule.unit_orders import UnitOrders


class Mix(Protocol):
    """A way to mix."""

    def __call__(self, orders: UnitOrders, durations: Durations) -> list[list[int]] | None:
        """Codes of every rank's forwards and backwards, in order; None if that stalls."""
        ...


@dataclass(frozen=True)
class Rule:
    """Warm-up, one forward and one backward in turns, cool-down.

    Attributes:
        knob: extra warm-up forwards of a rank for each rank behind it.
        cap: most units that a rank may hold, which cuts the warm-up short; None for no limit.
    """

    knob: float
    cap: int | None = None

    def __call__(self, orders: UnitOrders, durations: Durations) -> list[list[int]]:
        """See `Mix`; times play no part."""
        most = orders.length if self.cap is None else self.cap - 1
        return [mix(orders, rank, min(warmup, most)) for rank, warmup in enumerate(warmups(orders, self.knob))]


@dataclass(frozen=True)
class Greedy:
    """What a greedy play runs.

    Attributes:
        caps: the most units that each rank may hold.
        taste: what a rank prefers when it could do several things.
    """

    caps: tuple[int, ...]
    taste: greedy.Taste

    @classmethod
    def uniform(cls, orders: UnitOrders, cap: int, first: Literal["forward", "backward", "alternate"]) -> Greedy:
        """The same cap on every rank."""
        return cls((cap,) * orders.num_ranks, greedy.Taste(first, makes_room=True))

    def __call__(self, orders: UnitOrders, durations: Durations) -> list[list[int]] | None:
        """See `Mix`."""
        return greedy.mix(orders, durations, self.caps, self.taste)


def candidates_under(cap: int, floor: int, knob: int, orders: UnitOrders) -> list[Mix]:
    """Mixes that keep a cap below what the rule takes.

    Under a tight cap the rule makes ranks wait for forwards that do not fit yet, where a backward could run. Which
    greedy mix is best depends on the times; on small problems one of these is a proven optimum (`tests/schedule`).

    Args:
        cap: most units that a rank may hold.
        floor: the fewest with which a first backward can run.
        knob: extra units of a rank for each rank behind it.
        orders: the order of the forwards and that of the backwards.
    """
    caps = _caps(cap, floor, knob, orders)
    return [Rule(knob, cap), *(Greedy(each, taste) for each in caps for taste in greedy.TASTES)]


def candidates_with_differences(cap: int, floor: int, knob: int, orders: UnitOrders) -> list[Mix]:
    """Mixes for units of different work, such as a few very short microbatches beside long ones.

    Where turns are taken one by one, every rank waits while another runs a longer unit; these let it go on with what is
    there. The arguments are those of `candidates_under`.
    """
    tastes = [taste for taste in greedy.TASTES if taste.first != "forward" and not taste.makes_room]
    return [Greedy(caps, taste) for caps in _caps(cap, floor, knob, orders) for taste in tastes]


def _caps(cap: int, floor: int, knob: int, orders: UnitOrders) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For every rank: the cap, or as much of it as the rule takes."""
    ranks = range(orders.num_ranks)
    staircase = tuple(min(cap, floor + knob * (orders.num_ranks - 1 - rank)) for rank in ranks)
    return (cap,) * orders.num_ranks, staircase
