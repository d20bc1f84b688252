"""The memory curve against intervals added up one by one, and its peak against the order alone."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.actions import Action, Kind, Unit
from lightning_seq1f1b.schedule.codes import Codes
from lightning_seq1f1b.schedule.memory_curve import UnitSizes, memory_over_time, peaks
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.simulate import Costs, simulate
from lightning_seq1f1b.schedule.timeline import Event


def row(texts: str, rank: int = 0) -> list[Event]:
    """Events of one rank, one time unit each."""
    return [Event(rank, Action.parse(text), time, time + 1) for time, text in enumerate(texts.split())]


def held_at(time: float, events: list[Event], sizes: UnitSizes) -> float:
    """What one rank holds just after a time, from the definition of what is held from when to when."""
    when = {str(event.action): event for event in events}
    total = 0.0
    for event in events:
        kind, stage, (microbatch, chunk) = event.action
        if kind is not Kind.F:
            continue

        def end_of(kinds: str, chunk: int, stage: int = stage, microbatch: int = microbatch) -> float:
            return next(
                (when[text].end for kind in kinds if (text := f"{stage}{kind}{microbatch}.{chunk}") in when),
                float("inf"),
            )

        if event.start <= time < end_of("BI", chunk):
            total += sizes.activations[stage][chunk]
        if end_of("I", chunk) <= time < end_of("W", chunk):
            total += sizes.deferred[stage][chunk]
        if event.start <= time < end_of("BI", 0):
            total += sizes.keys_values[stage][chunk]
    return total


SIZES = UnitSizes(
    activations=((100.0, 60.0), (90.0, 50.0)), deferred=((30.0, 20.0), (80.0, 70.0)), keys_values=((8.0, 4.0),) * 2
)
SPLIT = "0F0.0 0F0.1 1F0.0 1F0.1 1I0.1 0F1.0 1I0.0 1W0.1 0I0.1 1W0.0 0F1.1 0I0.0 0W0.1 0W0.0"
FUSED = "0F0.0 0F0.1 1F0.0 1F0.1 1B0.1 0F1.0 1B0.0 0B0.1 0F1.1 0B0.0"


def test_a_split_backward_by_hand() -> None:
    sizes = UnitSizes(activations=((10, 6),), deferred=((3, 2),), keys_values=((1, 1),))
    assert memory_over_time(row("0F0.0 0F0.1 0I0.1 0I0.0 0W0.0 0W0.1"), 1, sizes) == [
        [(0, 11), (1, 18), (3, 14), (4, 5), (5, 2), (6, 0)]
    ]


@pytest.mark.parametrize("texts", [SPLIT, FUSED, "0F0.0 0F0.1 0B0.1 0B0.0"])
def test_the_curve_is_the_sum_of_the_intervals(texts: str) -> None:
    events = row(texts)
    (curve,) = memory_over_time(events, 1, SIZES)
    for time in range(len(events) + 1):
        held = [level for at, level in curve if at <= time][-1]
        assert held == held_at(time, events, SIZES)


def test_a_timeline_without_backwards_frees_after_the_forward() -> None:
    sizes = UnitSizes(activations=((10, 6),), deferred=((0, 0),), keys_values=((2, 1),))
    events = row("0F0.0 0F0.1 0F1.0 0F1.1")
    (curve,) = memory_over_time(events, 1, sizes)
    assert curve == [(0, 12), (1, 2), (1, 9), (2, 0), (2, 12), (3, 2), (3, 9), (4, 0)]
    assert peaks(make_plan("forward", 1, 2, 2), sizes) == [12]


def test_transfers_hold_nothing_and_order_of_ranks_does_not_matter() -> None:
    events = [*row("1F0.0 1B0.0", rank=1), *row("0F0.0 0SEND_F0.0 0RECV_B0.0 0B0.0", rank=0)]
    assert memory_over_time(reversed(events), 2, UnitSizes.one_each(2, 1)) == [
        [(0, 1), (4, 0)],
        [(0, 1), (2, 0)],
    ]


def test_one_each_counts_the_units_of_the_simulation() -> None:
    for schedule, num_ranks, num_microbatches, num_chunks in product(
        ("seq1f1b", "gpipe", "forward"), range(1, 4), range(1, 4), range(1, 4)
    ):
        plan = make_plan(schedule, num_ranks, num_microbatches, num_chunks)
        sizes = UnitSizes.one_each(num_ranks, num_chunks)
        assert tuple(peaks(plan, sizes)) == simulate(plan, Costs(1, 1, 1, num_chunks)).peak_units


@given(data=st.data())
def test_the_peak_of_the_order_is_the_peak_of_the_curve(data: st.DataObject) -> None:
    """A random order of one rank's split step: every W anywhere behind its I."""
    numbers = st.integers(0, 100)
    num_chunks = data.draw(st.integers(1, 3))
    table = st.tuples(*[st.tuples(*[numbers] * num_chunks)] * 2)
    sizes = UnitSizes(data.draw(table), data.draw(table), data.draw(table))
    order: list[Action] = []
    waiting: list[Action] = []
    for microbatch in range(data.draw(st.integers(1, 2))):
        chunks = range(num_chunks)
        units = [(Kind.F, stage, chunk) for stage in (0, 1) for chunk in chunks]
        units += [(Kind.I, stage, chunk) for stage in (1, 0) for chunk in reversed(chunks)]
        for kind, stage, chunk in units:
            order.append(Action(kind, stage, Unit(microbatch, chunk)))
            if kind is Kind.I:
                waiting.append(Action(Kind.W, stage, Unit(microbatch, chunk)))
            while waiting and data.draw(st.booleans()):
                order.append(waiting.pop(0))
    order += waiting
    times = [data.draw(st.integers(0, 2)) for _ in order]
    events = [Event(0, action, sum(times[:index]), sum(times[: index + 1])) for index, action in enumerate(order)]
    (curve,) = memory_over_time(events, 1, sizes)
    codes = Codes(2, (num_chunks, num_chunks))
    plan = Plan("by hand", codes.chunks, (0, 0), (codes.encode_row(order),))
    assert peaks(plan, sizes) == [max((level for _, level in curve), default=0)]
    assert not curve or curve[-1][1] == 0


def test_tables_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"activations \[2\], deferred \[1\], keys_values \[2\]"):
        UnitSizes(activations=((1, 2),), deferred=((1,),), keys_values=((1, 2),))
