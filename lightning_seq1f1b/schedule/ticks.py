"""Times as whole numbers of a common tick: as exact as fractions, and several times faster to add up."""

from __future__ import annotations

from fractions import Fraction
from itertools import chain
from math import lcm

from lightning_seq1f1b.schedule.timeline import Time
from lightning_seq1f1b.schedule.unit_times import StepTimes, UnitTimes


def in_ticks(times: StepTimes, latency: Time) -> tuple[StepTimes, Time, int]:
    """The same times and latency in ticks, and how many ticks are one unit of time.

    Times that are floats stay as they are, one tick a unit: they gain nothing, and would need tiny ticks.
    """
    each = (times,) if isinstance(times, UnitTimes) else times
    tables = [(one.forward, one.input_grad, one.weight_grad) for one in each]
    numbers = {latency, *chain.from_iterable(chain.from_iterable(chain.from_iterable(tables)))}
    if any(isinstance(number, float) for number in numbers):
        return times, latency, 1
    in_a_unit = lcm(*(Fraction(number).denominator for number in numbers))
    whole = {number: int(number * in_a_unit) for number in numbers}
    counted = tuple(
        UnitTimes(*(tuple(tuple(whole[number] for number in row) for row in table) for table in kinds))
        for kinds in tables
    )
    return counted[0] if isinstance(times, UnitTimes) else counted, whole[latency], in_a_unit
