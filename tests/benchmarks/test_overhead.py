"""What the benchmark of overhead makes of times."""

from __future__ import annotations

import pytest

from benchmarks.overhead import Taken, ratios


def taken(*cpu: float) -> Taken:
    return Taken(wall=[2 * seconds for seconds in cpu], cpu=list(cpu))


def test_ratios_add_up_both_ranks() -> None:
    first = {
        "whole": taken(10.0, 11.0),
        "inside": taken(8.0, 9.0),
        "alone": taken(9.0, 10.0),
        "update": taken(1.0, 1.0),
    }
    second = {"whole": taken(5.0, 6.0), "inside": taken(4.0, 4.0), "alone": taken(5.0, 5.0), "update": taken(0.5, 0.5)}
    found = ratios([first, second])
    assert found["outside"] == pytest.approx([15 / 13.5 - 1, 17 / 14.5 - 1])
    assert found["ratio_cpu"] == pytest.approx([15 / 14 - 1, 17 / 15 - 1])
    assert found["ratio_wall"] == pytest.approx([10 / 9 - 1, 11 / 10 - 1])
