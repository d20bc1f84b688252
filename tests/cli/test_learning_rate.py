"""The learning rate's shape."""

from __future__ import annotations

import itertools
import math

import pytest

from lightning_seq1f1b.cli.learning_rate import learning_rate_factor


def test_the_warm_up_rises_in_equal_steps_to_the_highest_rate():
    assert [learning_rate_factor(step, 4, 100, "cosine") for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.5), ("cosine", 0.5)])
def test_the_decay_falls_to_zero_at_the_last_step(decay, middle):
    factors = [learning_rate_factor(step, 4, 24, decay) for step in range(25)]
    assert factors[14] == pytest.approx(middle)
    assert factors[24] == pytest.approx(0.0, abs=1e-12)
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[4:]))


def test_cosine_and_linear_differ_in_between():
    assert learning_rate_factor(5, 0, 20, "cosine") == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    assert learning_rate_factor(5, 0, 20, "linear") == pytest.approx(0.75)


def test_without_an_end_or_decay_the_highest_rate_stays():
    assert learning_rate_factor(10**6, 3, math.inf, "cosine") == 1.0
    assert learning_rate_factor(10**6, 3, 10, "none") == 1.0


def test_a_warm_up_longer_than_the_run_is_a_rise_only():
    assert [learning_rate_factor(step, 10, 5, "linear") for step in range(5)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.4, 0.5]
    )
