"""From a schedule's settings to the compute order of every rank: the rule, or what keeps a cap best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from lightning_seq1f1b.schedule.mixes import Greedy, Mix, Rule, candidates_under, candidates_with_differences
from lightning_seq1f1b.schedule.play import Play, expand, fill_gaps, play
from lightning_seq1f1b.schedule.policies import Policy, forward_only, mix
from lightning_seq1f1b.schedule.timeline import Time
from lightning_seq1f1b.schedule.unit_orders import UnitOrders
from lightning_seq1f1b.schedule.unit_times import StepTimes, UnitTimes

_KNOB_SHARES = (0.625, 0.75, 0.875)
"""Shares of the memory knob that are tried too where times are known: a shorter warm-up can suit unequal times."""

_MOST_UNITS_TO_COMPARE = 20_000
"""Orders of larger plans are compared on a few microbatches: in the steady phase all are alike."""

_MICROBATCHES_TO_COMPARE = 4

NEARLY_SERIAL = 1.5
"""A cap that makes a step this much longer than without it is refused: the ranks then mostly wait for each other."""


class StallError(ValueError):
    """The settings make an order in which the ranks wait for each other."""


@dataclass(frozen=True)
class ComputeOrders:
    """What every rank computes.

    Attributes:
        rows: codes of every rank's compute actions, in order; where the backward is split, each W stands where it runs
            under the times that were given.
        activation_cap: most units that a rank may hold while its W move; None where nothing moves.
    """

    rows: list[list[int]]
    activation_cap: int | None


def compute_orders(
    policy: Policy, orders: UnitOrders, knob: int, cap: int | None, times: StepTimes | None
) -> ComputeOrders:
    """Order the compute actions of all ranks.

    Args:
        policy: the schedule.
        orders: the order of its forwards and that of its backwards.
        knob: extra warm-up forwards of a rank for each rank behind it.
        cap: most units that a rank may hold; None for as many as the rule takes.
        times: what units take; equal when None.

    Raises:
        ValueError: for a cap under which no first backward can run, or under which the step is nearly serial.
        StallError: for a knob with which the ranks wait for each other.
    """
    if not policy.trains:
        return ComputeOrders(forward_only(orders), None)
    if policy.memory_knob is None:
        return ComputeOrders([mix(orders, rank, orders.length) for rank in range(orders.num_ranks)], _all(orders, cap))
    floor = min(orders.before_the_first_backward + 1, orders.length)
    natural = min(floor + knob * (orders.num_ranks - 1), orders.length)
    comparison = _Comparison(orders, times)
    if cap is not None and cap < natural:
        limits = _Limits(comparison, floor, natural, knob)
        if cap < floor:
            raise ValueError(
                f"activation_cap={cap} is below {floor}, the units that a rank must hold before the first backward of "
                f"this schedule can run; set activation_cap={limits.nearest_to(floor)} or more, or use fewer chunks or "
                "virtual stages"
            )
        best = limits.best(cap)
        if limits.slowdown(best, cap) > NEARLY_SERIAL:
            raise ValueError(
                f"activation_cap={cap} would make the step {limits.slowdown(best, cap):.1f} times as long, with the "
                f"ranks mostly waiting for each other; the nearest that does not is "
                f"activation_cap={limits.nearest_to(cap)}"
            )
    elif policy.splits_backward or not orders.codes.alike:
        most = natural if cap is None else cap
        if policy.splits_backward:
            cap = most
        mixes: list[Mix] = [Rule(knob)]
        if times is not None and not orders.codes.alike:
            mixes += candidates_with_differences(most, floor, knob, orders)
        elif times is not None and knob > 1:
            mixes += [Rule(knob * share) for share in _KNOB_SHARES] + [Greedy.uniform(orders, most, "alternate")]
        best = comparison.best(mixes, cap)
    else:
        best = _Way(Rule(knob))
    rows = best.rows(orders, times, cap)
    if rows is None and not orders.codes.alike:
        mixes = candidates_with_differences(natural if cap is None else cap, floor, knob, orders)
        rows = comparison.best(mixes, cap).rows(orders, times, cap)
    if rows is None:
        raise StallError("the ranks would wait for each other for ever")
    return ComputeOrders(rows, cap)


@dataclass(frozen=True)
class _Way:
    """A mix of forwards and backwards, and how weight gradients fill its gaps."""

    mix: Mix
    patient: bool = True

    def play(self, orders: UnitOrders, times: StepTimes | None, cap: int | None) -> Play | None:
        """A step; None if it stalls."""
        durations = expand(times or _equal_times(orders), orders.codes)
        rows = self.mix(orders, durations)
        if rows is None:
            return None
        if orders.splits:
            played = fill_gaps(rows, orders.stage_to_rank, orders.codes, durations, cap, patient=self.patient)
        else:
            played = play(rows, orders.stage_to_rank, orders.codes, durations)
        return None if played.waiting else played

    def rows(self, orders: UnitOrders, times: StepTimes | None, cap: int | None) -> list[list[int]] | None:
        """Codes of every rank's compute actions; None if they stall."""
        played = self.play(orders, times, cap)
        if played is None:
            return None
        rows: list[list[int]] = [[] for _ in range(orders.num_ranks)]
        for rank, code, _, _ in played.actions:
            rows[rank].append(code)
        return rows


class _Comparison:
    """Compares ways by the length of a step, on fewer microbatches where there are many units."""

    def __init__(self, orders: UnitOrders, times: StepTimes | None) -> None:
        if orders.length * orders.num_ranks > _MOST_UNITS_TO_COMPARE:
            few = min(orders.codes.num_microbatches, 2 * len(orders.groups[0]) + _MICROBATCHES_TO_COMPARE)
            orders = replace(orders, codes=replace(orders.codes, chunks=orders.codes.chunks[:few]))
            times = times[:few] if isinstance(times, tuple) else times
        self.orders, self.times = orders, times

    def best(self, mixes: Sequence[Mix], cap: int | None) -> _Way:
        """The way whose step is shortest; the first of several."""
        ways = [_Way(mix, patient) for mix in mixes for patient in ((True, False) if self.orders.splits else (True,))]
        return ways[0] if len(ways) == 1 else min(ways, key=lambda way: self.makespan(way, cap))

    def makespan(self, way: _Way, cap: int | None) -> Time:
        """Length of a step."""
        played = way.play(self.orders, self.times, cap)
        return inf if played is None else max(end for *_, end in played.actions)


def _equal_times(orders: UnitOrders) -> UnitTimes:
    ones = ((1,) * orders.codes.num_chunks,) * orders.codes.num_stages
    return UnitTimes(ones, ones, ones)


def _all(orders: UnitOrders, cap: int | None) -> int | None:
    if cap is not None and cap < orders.length:
        raise ValueError(
            f"activation_cap={cap} is too small: this schedule holds all {orders.length} units of a rank at once; set "
            f"activation_cap={orders.length} or more, or choose another schedule"
        )
    return cap


@dataclass(frozen=True)
class _Limits:
    """What caps below that of the rule cost, from the fewest units with which a backward can run."""

    comparison: _Comparison
    floor: int
    natural: int
    knob: int

    def best(self, cap: int) -> _Way:
        """The shortest step under a cap."""
        return self.comparison.best(candidates_under(cap, self.floor, self.knob, self.comparison.orders), cap)

    def slowdown(self, way: _Way, cap: int) -> float:
        """How much longer a step is than without a cap."""
        return float(self.comparison.makespan(way, cap) / self._full) if self._full else 1.0

    def nearest_to(self, cap: int) -> int:
        """The smallest cap from `cap` on under which a step is not nearly serial."""
        fine = (each for each in range(cap, self.natural) if self.slowdown(self.best(each), each) <= NEARLY_SERIAL)
        return next(fine, self.natural)

    @cached_property
    def _full(self) -> Time:
        return self.comparison.makespan(_Way(Rule(self.knob)), self.natural)
