"""Fits of measured times: exact where the times follow the law, sensible where they do not."""

from __future__ import annotations

import random

import pytest

from lightning_seq1f1b.schedule.costs import attended_pairs
from lightning_seq1f1b.schedule.planner.fitting import Sample, error, fit
from lightning_seq1f1b.schedule.profile import Fit
from lightning_seq1f1b.schedule.spans import spans

ROW = spans([64, 128, 256, 512, 512, 256, 128, 64])


def samples(law: Fit, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    draw = random.Random(seed)
    taken = []
    for span in ROW:
        pairs = attended_pairs(span.start, span.stop)
        seconds = law(pairs, span.length) * (1 + noise * draw.uniform(-1, 1))
        taken.append(Sample(pairs, span.length, seconds, seconds or 1.0))
    return taken


@pytest.mark.parametrize(
    "law",
    [Fit(2e-9, 3e-6, 4e-5), Fit(2e-9, 0.0, 4e-5), Fit(0.0, 3e-6, 0.0), Fit(0.0, 0.0, 1e-4), Fit(5e-9, 0.0, 0.0)],
)
def test_a_law_is_found_again(law):
    found = fit(samples(law))
    for name in ("pairs", "tokens", "constant"):
        assert getattr(found, name) == pytest.approx(getattr(law, name), rel=1e-6, abs=1e-15), name
    assert error(found, samples(law)) < 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_noise_leaves_coefficients_that_are_not_negative(seed):
    law = Fit(1e-9, 1e-6, 0.0)
    noisy = samples(law, noise=0.1, seed=seed)
    found = fit(noisy)
    assert min(found.pairs, found.tokens, found.constant) >= 0
    assert error(found, noisy) < 0.1
    # The law itself is one of the candidates, so the fit is no worse in what it minimises.
    assert squares(found, noisy) <= squares(law, noisy)


def squares(found: Fit, taken: list[Sample]) -> float:
    return sum(((found(one.pairs, one.tokens) - one.seconds) / one.whole) ** 2 for one in taken)


def test_small_times_count_as_much_as_large_ones():
    """One law for short chunks, another for long: the relative error is shared, not given to the short ones."""
    bent = [Sample(0.0, tokens, seconds, seconds) for tokens, seconds in ((10, 1.0), (1000, 10.0), (1010, 10.1))]
    found = fit(bent, attends=False)
    assert abs(found(0.0, 10) - 1.0) < 0.05
    assert found.pairs == 0


def test_a_part_that_takes_no_time_or_less_gets_zero():
    nothing = [Sample(100.0, 10.0, -1e-6, 1e-3), Sample(900.0, 30.0, -2e-6, 1e-3)]
    assert fit(nothing) == Fit(0.0, 0.0, 0.0)
    assert error(Fit(0.0, 0.0, 0.0), nothing) == pytest.approx(1.5e-3)


def test_one_size_alone_is_fitted_too():
    alone = [Sample(50.0, 10.0, 2.0, 2.0)] * 3
    assert fit(alone)(50.0, 10.0) == pytest.approx(2.0)
