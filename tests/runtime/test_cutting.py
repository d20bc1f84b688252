"""How batches are cut and planned: automatic numbers of chunks, and the knobs of the schedule."""

import pytest

from lightning_seq1f1b.runtime.pipeline import Cutting
from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.plan import make_plan

SHAPE = ModelShape(
    num_layers=8,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=32,
    gated_mlp=True,
    vocab_size=32,
)


@pytest.mark.parametrize(
    ("schedule", "length", "chunks"),
    [
        ("seq1f1b", 1000, 1),
        ("interleaved_seq1f1b_zb", 5000, 4),
        ("gpipe", 100_000, 12),
        ("1f1b", 100_000, 1),
        ("interleaved_1f1b", 100_000, 1),
        ("zb1p", 100_000, 1),
    ],
)
def test_chunks_are_as_many_as_the_length_and_the_schedule_allow(schedule, length, chunks):
    spans = Cutting(schedule).spans(length, 3, SHAPE)
    assert len(spans) == chunks
    assert (spans[0].start, spans[-1].stop) == (0, length)


@pytest.mark.parametrize(("partition", "lengths"), [("even", [25] * 4), (0.0, [25] * 4), ((40, 35, 25), [40, 35, 25])])
def test_partitions_of_every_kind(partition, lengths):
    cutting = Cutting(num_chunks=None if isinstance(partition, tuple) else 4, partition=partition)
    assert [span.length for span in cutting.spans(100, 2, SHAPE)] == lengths


def test_a_partition_between_even_and_balanced():
    first = {share: Cutting(num_chunks=4, partition=share).spans(10_000, 2, SHAPE)[0].length for share in (0, 0.5, 1)}
    assert first[0] < first[0.5] < first[1]
    assert first[1] == Cutting(num_chunks=4).spans(10_000, 2, SHAPE)[0].length


def test_training_and_evaluation_have_the_same_stages():
    cutting = Cutting("interleaved_seq1f1b_zb", num_chunks=4, virtual_stages=2, memory_knob=2, activation_cap=11)
    spans = cutting.spans(64, 2, SHAPE)
    assert cutting.plan(3, spans, 2, training=True) == make_plan(
        "interleaved_seq1f1b_zb", 2, 3, 4, virtual_stages=2, memory_knob=2, activation_cap=11
    )
    evaluation = cutting.plan(3, spans, 2, training=False)
    assert evaluation == make_plan("forward", 2, 3, 4, virtual_stages=2)
    assert evaluation.stage_to_rank == (0, 1, 0, 1)
    assert not evaluation.trains
