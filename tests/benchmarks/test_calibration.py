"""The simulator meets published iteration times and memory, with two constants fitted to one and two chunks."""

from __future__ import annotations

import pytest

from benchmarks.calibration import LENGTH, MICROBATCHES, PUBLISHED, STAGES, code_flops, fit, predicted

RUNS = PUBLISHED["runs"]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"k={run['chunks']}")
def test_iterations_take_as_long_and_stages_hold_as_much_as_published(run: dict) -> None:
    found = predicted(run["chunks"], *fit(RUNS[:2]))
    assert found["iteration_s"] == pytest.approx([run["iteration_s"]], rel=0.03)
    assert found["allocated_mib"] == pytest.approx(run["allocated_mib"], rel=0.1)


def test_the_fit_makes_the_stage_of_layers_right_with_one_and_two_chunks() -> None:
    for run in RUNS[:2]:
        found = predicted(run["chunks"], *fit(RUNS[:2]))
        published = run["forward_ms"][0] + run["backward_ms"][0]
        assert found["forward_ms"][0] + found["backward_ms"][0] == pytest.approx(published, rel=1e-6)


def test_the_vocabulary_is_the_one_that_the_logged_flops_imply() -> None:
    for run in RUNS:
        flops = 3 * code_flops(0, LENGTH) * MICROBATCHES / STAGES
        assert flops / run["iteration_s"] / 1e12 == pytest.approx(run["teraflops"], rel=2e-3)
