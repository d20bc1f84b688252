"""Cutting loses no token, no target and no weight."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.runtime.batching import IGNORE_INDEX, cut_batch, needed_mask, shift_labels, split_rows
from lightning_seq1f1b.schedule.partition import even
from lightning_seq1f1b.schedule.spans import Span


@given(rows=st.integers(1, 9), wanted=st.one_of(st.none(), st.integers(1, 12)))
def test_rows_are_split_without_gap_as_evenly_as_possible(rows, wanted):
    ranges = split_rows(rows, wanted)
    assert [start for start, _ in ranges] == [0, *[stop for _, stop in ranges[:-1]]]
    assert ranges[-1][1] == rows
    sizes = [stop - start for start, stop in ranges]
    assert len(sizes) == (rows if wanted is None else min(rows, wanted))
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@given(
    rows=st.integers(1, 4),
    length=st.integers(1, 17),
    chunks=st.integers(1, 6),
    wanted=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_chunks_put_together_give_the_batch_back(rows, length, chunks, wanted, seed):
    chunks = min(chunks, length)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (rows, length), generator=generator)
    labels = torch.where(torch.rand(rows, length, generator=generator) < 0.3, IGNORE_INDEX, ids)
    microbatches = cut_batch({"input_ids": ids, "labels": labels}, wanted, even(length, chunks))

    def joined(name):
        return torch.cat([torch.cat([getattr(c, name) for c in m.chunks], 1) for m in microbatches])

    assert torch.equal(joined("input_ids"), ids)
    assert torch.equal(joined("position_ids"), torch.arange(length).expand(rows, length))
    assert torch.equal(joined("labels"), shift_labels(labels))
    supervised = int((labels[:, 1:] != IGNORE_INDEX).sum())
    assert {int(c.loss_denominator) for m in microbatches for c in m.chunks} == {max(1, supervised)}


def test_given_positions_and_number_of_items_are_kept():
    batch = {
        "input_ids": torch.arange(6).view(1, 6),
        "labels": torch.arange(6).view(1, 6),
        "position_ids": torch.arange(3, 9).view(1, 6),
        "num_items_in_batch": torch.tensor(17),
    }
    (microbatch,) = cut_batch(batch, None, even(6, 2))
    assert microbatch.chunks[1].position_ids.tolist() == [[6, 7, 8]]
    assert int(microbatch.chunks[0].loss_denominator) == 17


def test_spans_that_do_not_cover_the_rows_are_refused():
    with pytest.raises(ValueError, match="rows have 6 tokens"):
        cut_batch({"input_ids": torch.zeros(1, 6, dtype=torch.long)}, None, (Span(0, 5),))


def mask(*rows):
    return torch.tensor(rows)


def test_a_mask_is_dropped_only_where_no_supervised_token_needs_it():
    labels = mask([1, 2, 3, -100], [1, 2, -100, -100])
    assert needed_mask(None, labels) is None
    assert needed_mask(torch.ones(2, 4), labels) is None
    right = mask([1, 1, 1, 1], [1, 1, 1, 0])
    assert needed_mask(right, labels) is None
    supervised_padding = mask([1, 2, 3, -100], [1, 2, 3, 4])
    assert needed_mask(right, supervised_padding) is right
    left = mask([0, 1, 1, 1], [1, 1, 1, 1])
    assert needed_mask(left, labels) is left
    assert needed_mask(right, None) is right


def test_a_kept_mask_reaches_from_the_start_to_the_chunk_end():
    left = mask([0, 0, 1, 1, 1, 1])
    batch = {"input_ids": torch.ones(1, 6, dtype=torch.long), "attention_mask": left}
    (microbatch,) = cut_batch(batch, None, even(6, 3))
    assert [chunk.attention_mask.tolist() for chunk in microbatch.chunks] == [
        [[0, 0]],
        [[0, 0, 1, 1]],
        [[0, 0, 1, 1, 1, 1]],
    ]
