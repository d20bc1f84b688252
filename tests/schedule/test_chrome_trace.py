"""Traces: what the trace event format asks of every event, and that nothing of the timeline is lost in them."""

import json
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.chrome_trace import chrome_trace
from lightning_seq1f1b.schedule.memory_curve import UnitSizes
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import Costs, Simulation, simulate
from lightning_seq1f1b.schedule.timeline import Event
from lightning_seq1f1b.schedule.timeline_file import Recording

MEASURED = Recording(
    (
        Event(0, Action.parse("0F0.0"), 100.25, 100.5),
        Event(1, Action.parse("1F0.0"), 100.5, 101.0),
        Event(1, Action.parse("1B0.0"), 101.0, 102.0),
        Event(0, Action.parse("0B0.0"), 102.0, 102.5),
    ),
    "seq1f1b",
    "s",
)


def simulated() -> tuple[Simulation, Recording]:
    plan = make_plan("interleaved_seq1f1b_zb", 2, 2, 3, virtual_stages=2)
    simulation = simulate(plan, Costs(Fraction(1), Fraction(2), Fraction(1, 2), 3, virtual_stages=2))
    return simulation, Recording(simulation.timeline, plan.schedule, None)


def test_every_event_has_what_the_format_asks_for() -> None:
    trace = json.loads(json.dumps(chrome_trace({"measured": MEASURED, "simulated": simulated()[1]})))
    assert Counter(event["ph"] for event in trace["traceEvents"]).keys() == {"M", "X", "C"}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert event["ts"] >= 0
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    named = {
        (event["pid"], event["tid"], event["args"]["name"])
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    assert named == {(pid, rank, f"rank {rank}") for pid in (0, 1) for rank in (0, 1)}
    processes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert processes == ["measured: seq1f1b", "simulated: interleaved_seq1f1b_zb"]


def test_slices_are_the_timeline_in_microseconds() -> None:
    slices = [event for event in chrome_trace({"measured": MEASURED})["traceEvents"] if event["ph"] == "X"]
    assert [(each["name"], each["tid"], each["ts"], each["dur"]) for each in slices] == [
        ("F 0.0", 0, 0, 250_000),
        ("F 0.0", 1, 250_000, 500_000),
        ("B 0.0", 1, 750_000, 1_000_000),
        ("B 0.0", 0, 1_750_000, 500_000),
    ]
    assert slices[2]["args"] == {"action": "1B0.0", "stage": 1, "microbatch": 0, "chunk": 0}


@pytest.mark.parametrize(("unit", "microseconds"), [("ms", 250.0), ("us", 0.25), (None, 250_000.0)])
def test_other_units_of_time(unit: str | None, microseconds: float) -> None:
    trace = chrome_trace({"": Recording(MEASURED.events, None, unit)})
    assert next(event["dur"] for event in trace["traceEvents"] if event["ph"] == "X") == microseconds


def test_slices_of_a_thread_do_not_overlap() -> None:
    slices = [event for event in chrome_trace({"": simulated()[1]})["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == 4 * 2 * 3 * 3
    for rank in range(2):
        row = sorted((each for each in slices if each["tid"] == rank), key=lambda each: each["ts"])
        for earlier, later in pairwise(row):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 1e-6


def test_counters_reach_the_peak_and_end_empty() -> None:
    simulation, recording = simulated()
    trace = chrome_trace({"": recording})
    for rank, peak in enumerate(simulation.peak_units):
        counters = [event for event in trace["traceEvents"] if event["name"] == f"rank {rank} holds"]
        times = [event["ts"] for event in counters]
        assert times == sorted(set(times))
        assert max(event["args"]["units"] for event in counters) == peak
        assert counters[-1]["args"]["units"] == 0


def test_counters_in_bytes() -> None:
    sizes = UnitSizes(activations=((100,), (50,)), deferred=((0,), (0,)), keys_values=((10,), (5,)))
    counters = [event for event in chrome_trace({"": MEASURED}, sizes)["traceEvents"] if event["ph"] == "C"]
    assert [(each["name"], each["ts"], each["args"]["bytes"]) for each in counters] == [
        ("rank 0 holds", 0, 110),
        ("rank 0 holds", 2_250_000, 0),
        ("rank 1 holds", 0, 0),
        ("rank 1 holds", 250_000, 55),
        ("rank 1 holds", 1_750_000, 0),
    ]
