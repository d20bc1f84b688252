"""How batches are cut and planned: automatic numbers of chunks, and the knobs of the schedule."""

import pytest
import torch

from lightning_seq1f1b.runtime.pipeline import Cutting
from lightning_seq1f1b.runtime.row_groups import RowGroup
from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.partition import training_flops
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
    assert cutting.plan([len(spans)] * 3, 2, training=True) == make_plan(
        "interleaved_seq1f1b_zb", 2, 3, 4, virtual_stages=2, memory_knob=2, activation_cap=11
    )
    evaluation = cutting.plan([len(spans)] * 3, 2, training=False)
    assert evaluation == make_plan("forward", 2, 3, 4, virtual_stages=2)
    assert evaluation.stage_to_rank == (0, 1, 0, 1)
    assert not evaluation.trains


def groups(*lengths):
    return tuple(RowGroup((row,), length) for row, length in enumerate(lengths))


def counts(cutting, *lengths):
    spans = cutting.spans_of(groups(*lengths), 2, SHAPE)
    assert [(row[0].start, row[-1].stop) for row in spans] == [(0, length) for length in lengths]
    return [len(row) for row in spans]


def test_equal_rows_have_the_chunks_that_were_asked_for():
    cutting = Cutting(num_chunks=4)
    assert cutting.spans_of(groups(100, 100), 2, SHAPE) == (cutting.spans(100, 2, SHAPE),) * 2
    assert counts(Cutting(num_chunks=8), 5, 5) == [5, 5], "of one token at least"


def test_chunks_of_unequal_rows_carry_equal_work():
    cutting = Cutting(num_chunks=4)
    spans = cutting.spans_of(groups(1000, 333, 64, 5), 2, SHAPE)
    flops = training_flops(SHAPE)
    fair = sum(flops(0, row[-1].stop) for row in spans) / 16
    works = [flops(span.start, span.stop) for row in spans for span in row]
    assert max(works) <= fair * 1.02
    assert 16 <= len(works) < 20
    assert [len(row) for row in spans][2:] == [1, 1]


def test_automatic_numbers_are_those_of_the_longest_row():
    assert counts(Cutting(), 8192, 4096, 100) == [8, 3, 1], "half the tokens are less than half the work"
    planned = Cutting(num_chunks=8, counts_longest=True)
    assert counts(planned, 8192, 8192, 100)[:2] == [8, 8]
    assert counts(Cutting(num_chunks=8), 8192, 100, 100)[0] > 8


def test_whole_rows_stay_whole():
    assert counts(Cutting("1f1b"), 8192, 100) == [1, 1]
    assert counts(Cutting(num_chunks=1), 8192, 100) == [1, 1]


def test_listed_chunks_need_rows_of_their_sum_padding_included():
    cutting = Cutting(partition=[4, 2])
    real = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
    batch = {"input_ids": real, "attention_mask": real}
    assert [group.length for group in cutting.groups(batch)] == [6, 6]
    assert counts(cutting, 6, 6) == [2, 2]
    with pytest.raises(ValueError, match="add up to 6 tokens, but the rows have 7"):
        cutting.spans_of(groups(7), 2, SHAPE)


def test_plans_of_unequal_rows_are_kept():
    cutting = Cutting(num_chunks=4)
    spans = cutting.spans_of(groups(1000, 333), 2, SHAPE)
    plan = cutting.plan(tuple(map(len, spans)), 2, training=True)
    assert plan.chunks == tuple(map(len, spans))
    similar = cutting.spans_of(groups(990, 330), 2, SHAPE)
    assert cutting.plan(tuple(map(len, similar)), 2, training=True) is plan
