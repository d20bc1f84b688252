"""Peaks of activations that were counted in a step that ran, against those predicted from the architecture alone."""

from __future__ import annotations

import pytest

from benchmarks.activation_memory import NUM_LAYERS, first_stage_peak, model
from lightning_seq1f1b.models.shape import model_shape
from lightning_seq1f1b.runtime.pipeline import Cutting
from lightning_seq1f1b.schedule.estimate import Training, unit_sizes
from lightning_seq1f1b.schedule.memory_curve import peaks
from lightning_seq1f1b.schedule.plan import make_plan

ROWS, LENGTH = 4, 256


@pytest.mark.parametrize(
    ("num_stages", "schedule", "num_chunks", "partition"),
    [(2, "1f1b", 1, "even"), (2, "seq1f1b", 4, "even"), (2, "seq1f1b", 4, "balanced"), (4, "seq1f1b", 4, "balanced")],
)
def test_the_first_stage_holds_what_was_predicted(
    num_stages: int, schedule: str, num_chunks: int, partition: str
) -> None:
    cutting = Cutting(schedule, num_chunks=num_chunks, partition=partition, multiple=16)
    shape = model_shape(model().config)
    spans = cutting.spans(LENGTH, num_stages, shape)
    sizes = unit_sizes(shape, (NUM_LAYERS // num_stages,) * num_stages, spans, Training(rows=1, activation_bytes=4))
    predicted = peaks(make_plan(schedule, num_stages, ROWS, num_chunks), sizes)[0]
    assert predicted == pytest.approx(first_stage_peak(cutting, num_stages, ROWS, LENGTH), rel=0.1)
