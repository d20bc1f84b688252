"""The profile of the pipeline benchmark and the bubbles that are compared."""

import pytest

from benchmarks.pipeline_prediction import fit_profile, idle_share, predicted_bubble
from lightning_seq1f1b.schedule.actions import Action, Kind, Unit
from lightning_seq1f1b.schedule.partition import even
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.spans import Span
from lightning_seq1f1b.schedule.timeline import Event


def test_fit_finds_the_three_constants():
    samples = []
    known = {(0, Kind.F): (3e-7, 2e-4, 1e-2), (1, Kind.B): (7e-7, 5e-4, 3e-2)}
    for (stage, kind), (a, b, c) in known.items():
        for stop in (512, 1024, 2048):
            for tokens in (256, 512):
                seconds = a * (tokens * stop - tokens**2 / 2) + b * tokens + c
                samples.append((Action(kind, stage, Unit(0, 0)), Span(stop - tokens, stop), seconds))
    fits = fit_profile(samples)
    assert fits.keys() == known.keys()
    for key, constants in known.items():
        assert (fits[key].pairs, fits[key].tokens, fits[key].constant) == pytest.approx(constants)


def test_predicted_bubble_is_the_known_one_for_equal_units():
    spans = even(1024, 4)
    samples = [
        (Action(kind, stage, Unit(0, 0)), span, weight * span.length)
        for kind, weight in ((Kind.F, 1.0), (Kind.B, 2.0))
        for stage in range(2)
        for span in spans
    ]
    # (p - 1) T / k beside m T of work.
    expected = (1 / 4) / (2 + 1 / 4)
    assert predicted_bubble(make_plan("seq1f1b", 2, 2, 4), spans, fit_profile(samples)) == pytest.approx(expected)


def test_idle_share():
    action = Action(Kind.F, 0, Unit(0, 0))
    events = [Event(0, action, 5.0, 9.0), Event(1, action, 7.0, 15.0)]
    assert idle_share(events, 2) == pytest.approx(1 - 12 / 20)
