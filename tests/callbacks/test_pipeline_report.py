"""From what ranks have seen to what is logged, on made-up times whose answer is known."""

from __future__ import annotations

from math import nan

import pytest

from lightning_seq1f1b.callbacks.pipeline_report import GIB, Run, Seen, report


def alone(numbers: list[float], by: str) -> list[float]:
    return numbers


def joined(other: list[Seen]):
    """What a second replica adds: it is asked the same, in the same order."""
    asked: dict[str, list[float]] = {}

    def note(numbers: list[float], by: str) -> list[float]:
        asked[by] = numbers
        return numbers

    report(other, note, 1, None)
    ways = {"sum": sum, "max": max}
    return lambda numbers, by: [ways[by](pair) for pair in zip(numbers, asked[by], strict=True)]


def ranks(*, machines: tuple[str, str] = ("here", "here"), shift: float = 0.0, factor: float = 1.0) -> list[Seen]:
    """Two runs of 10 s each: rank 0 computes for 6 s and 6 s, rank 1 for 4 s and 8 s."""
    first = [Run(0, 1, 11, 6), Run(20, 20, 30, 6)]
    second = [Run(0, 3, 9, 4), Run(20, 21, 29, 8)]
    second = [Run(*(time + shift for time in run[:3]), run.busy) for run in second]
    numbers = {"steps": 1, "tokens": int(400 * factor), "supervised": 100, "flops": 5e13}
    return [
        Seen(machines[0], first, seconds=38.0, data_seconds=1.0, peak_bytes=2 * GIB, **numbers),
        Seen(machines[1], second, seconds=40.0, data_seconds=3.0, peak_bytes=GIB * factor, **numbers),
    ]


EXPECTED = {
    "pipeline/bubble": 1 - 24 / 40,
    "pipeline/bubble/rank_0": 1 - 12 / 20,
    "pipeline/bubble/rank_1": 1 - 12 / 20,
    "pipeline/step_seconds": 40.0,
    "pipeline/data_seconds": 3.0,
    "pipeline/tokens_per_second": 10.0,
    "pipeline/supervised_tokens_per_second": 2.5,
    "pipeline/peak_memory_gib/rank_0": 2.0,
    "pipeline/peak_memory_gib/rank_1": 1.0,
}


def test_one_replica() -> None:
    assert report(ranks(), alone, 1, None) == pytest.approx(EXPECTED)


def test_mfu_is_the_share_of_what_all_devices_could_reach() -> None:
    assert report(ranks(), alone, 1, 1e12)["pipeline/mfu"] == pytest.approx(5e13 / (40 * 2 * 1e12))


def test_steps_share_the_time() -> None:
    seen = ranks()
    for rank in seen:
        rank.steps = 4
    metrics = report(seen, alone, 1, None)
    assert metrics["pipeline/step_seconds"] == 10.0
    assert metrics["pipeline/data_seconds"] == 0.75
    assert metrics["pipeline/tokens_per_second"] == 10.0


def test_clocks_of_two_machines_are_aligned_where_a_run_begins() -> None:
    # Rank 0 starts one second late in the first run: with clocks of one machine that is no part of the run.
    assert report(ranks(machines=("here", "there"), shift=1000.0), alone, 1, None) == pytest.approx(EXPECTED)
    assert report(ranks(shift=1000.0), alone, 1, None)["pipeline/bubble"] > 0.9


def test_replicas_add_up() -> None:
    metrics = report(ranks(), joined(ranks(factor=2.0)), 2, 1e12)
    assert metrics == pytest.approx(
        {
            **EXPECTED,
            "pipeline/tokens_per_second": 30.0,
            "pipeline/supervised_tokens_per_second": 5.0,
            "pipeline/mfu": 1e14 / (40 * 4 * 1e12),
            "pipeline/peak_memory_gib/rank_1": 2.0,
        }
    )


def test_what_is_not_known_is_left_out() -> None:
    seen = ranks()
    for rank in seen:
        rank.runs, rank.peak_bytes = [], nan
    metrics = report(seen, alone, 1, None)
    assert {name for name in EXPECTED if "bubble" not in name and "memory" not in name} == set(metrics)
