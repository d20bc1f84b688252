"""Cutting loses no token, no target and no weight."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.runtime.batching import (
    IGNORE_INDEX,
    cut_batch,
    cut_groups,
    row_ends,
    shift_labels,
)
from lightning_seq1f1b.runtime.needs import needs_of
from lightning_seq1f1b.runtime.row_groups import RowGroup, group_rows, split_rows
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


def needs_mask(attention_mask, labels):
    """Whether one microbatch of all rows needs it, and what each row as a microbatch of its own does."""
    supervised = None if labels is None else labels != IGNORE_INDEX
    (together,) = needs_of([RowGroup((0, 1), 4)], attention_mask, supervised, None)
    alone = needs_of([RowGroup((1,), 4), RowGroup((0,), 4)], attention_mask, supervised, None)
    assert together.mask == any(needs.mask for needs in alone)
    return together.mask


def test_a_mask_is_dropped_only_where_no_supervised_token_needs_it():
    labels = mask([1, 2, 3, -100], [1, 2, -100, -100])
    assert not needs_mask(None, labels)
    assert not needs_mask(torch.ones(2, 4), labels)
    right = mask([1, 1, 1, 1], [1, 1, 1, 0])
    assert not needs_mask(right, labels)
    supervised_padding = mask([1, 2, 3, -100], [1, 2, 3, 4])
    assert needs_mask(right, supervised_padding)
    left = mask([0, 1, 1, 1], [1, 1, 1, 1])
    assert needs_mask(left, labels)
    assert needs_mask(right, None)


def test_what_stands_behind_a_microbatch_needs_no_mask():
    padded = mask([1, 1, 0, 1], [1, 1, 1, 1])
    assert not needs_of([RowGroup((0, 1), 2)], padded, None, None)[0].mask
    assert needs_of([RowGroup((0, 1), 4)], padded, None, None)[0].mask


def test_a_kept_mask_reaches_from_the_start_to_the_chunk_end():
    left = mask([0, 0, 1, 1, 1, 1])
    batch = {"input_ids": torch.ones(1, 6, dtype=torch.long), "attention_mask": left}
    (microbatch,) = cut_batch(batch, None, even(6, 3))
    assert [chunk.attention_mask.tolist() for chunk in microbatch.chunks] == [
        [[0, 0]],
        [[0, 0, 1, 1]],
        [[0, 0, 1, 1, 1, 1]],
    ]


def test_rows_end_where_nothing_but_padding_follows():
    ids = torch.ones(4, 6, dtype=torch.long)
    real = mask([1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0] * 6, [1, 0, 0, 0, 0, 0])
    labels = torch.full((4, 6), IGNORE_INDEX)
    assert row_ends({"input_ids": ids, "attention_mask": real, "labels": labels}) == [3, 6, 1, 1]
    labels[3, 4] = 7  # predicted at token 3, which is padding
    assert row_ends({"input_ids": ids, "attention_mask": real, "labels": labels}) == [3, 6, 1, 4]
    assert row_ends({"input_ids": ids, "labels": labels}) == [6] * 4


def test_packed_rows_end_before_documents_of_one_token():
    positions = mask([0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0], [0] * 6, [0, 1, 2, 3, 4, 5])
    batch = {"input_ids": torch.ones(4, 6, dtype=torch.long), "position_ids": positions}
    assert row_ends(batch) == [5, 2, 1, 6]
    assert row_ends(batch, labels_alone_count=False) == [6] * 4
    labels = torch.full((4, 6), IGNORE_INDEX)
    labels[1, 3] = 7
    assert row_ends({**batch, "labels": labels}) == [5, 3, 1, 6]


@given(ends=st.lists(st.integers(1, 9), min_size=1, max_size=9), wanted=st.one_of(st.none(), st.integers(1, 10)))
def test_microbatches_come_longest_first_and_equal_rows_in_their_order(ends, wanted):
    groups = group_rows(ends, wanted)
    order = [row for group in groups for row in group.rows]
    assert sorted(order) == list(range(len(ends)))
    assert [(-ends[row], row) for row in order] == sorted((-end, row) for row, end in enumerate(ends))
    assert [group.length for group in groups] == [max(ends[row] for row in group.rows) for group in groups]
    if len(set(ends)) == 1:
        assert [group.rows for group in groups] == [tuple(range(*bounds)) for bounds in split_rows(len(ends), wanted)]


def ragged():
    ids = torch.arange(18).view(3, 6)
    real = mask([1, 1, 0, 0, 0, 0], [1] * 6, [1, 1, 1, 1, 0, 0])
    return {"input_ids": ids, "labels": ids.masked_fill(real == 0, IGNORE_INDEX), "attention_mask": real}


def test_microbatches_have_lengths_and_chunks_of_their_own():
    batch = {**ragged(), "extra": torch.arange(36).view(3, 6, 2)}
    groups = group_rows(row_ends(batch), None)
    spans = [even(group.length, chunks) for group, chunks in zip(groups, (3, 2, 1), strict=True)]
    cut = cut_groups(batch, groups, spans)
    assert [microbatch.rows_of_batch for microbatch in cut] == [(1,), (2,), (0,)]
    assert [microbatch.length for microbatch in cut] == [6, 4, 2]
    assert [len(microbatch.chunks) for microbatch in cut] == [3, 2, 1]
    for microbatch in cut:
        (row,) = microbatch.rows_of_batch
        for chunk in microbatch.chunks:
            tokens = slice(chunk.span.start, chunk.span.stop)
            assert torch.equal(chunk.input_ids[0], batch["input_ids"][row, tokens])
            assert torch.equal(chunk.extras["extra"][0], batch["extra"][row, tokens])
            assert chunk.attention_mask is None
            assert chunk.real.all()
            assert (chunk.length, int(chunk.loss_denominator)) == (microbatch.length, 5 + 3 + 1)
    assert {int(microbatch.last_position) for microbatch in cut} == {5}, "as on one device, padding included"


def test_only_a_microbatch_that_needs_its_mask_has_one():
    real = mask([1, 1, 1, 0], [0, 1, 1, 1])
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "attention_mask": real}
    batch["labels"] = torch.full((2, 4), IGNORE_INDEX)
    left, right = cut_groups(batch, group_rows(row_ends(batch), None), [even(4, 2), even(3, 1)])
    assert left.chunks[1].attention_mask.tolist() == [[0, 1, 1, 1]]
    assert left.chunks[1].position_ids is None
    assert right.chunks[0].attention_mask is None
    assert right.chunks[0].position_ids.tolist() == [[0, 1, 2]]


def test_packed_documents_are_told_by_the_place_of_their_first_token():
    positions = mask([0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5])
    batch = {"input_ids": torch.ones(2, 6, dtype=torch.long), "position_ids": positions}
    packed, plain = cut_batch(batch, None, even(6, 2))
    assert [chunk.first_key.tolist() for chunk in packed.chunks] == [[[0, 0, 0]], [[3, 3, 5]]]
    assert packed.chunks[0].first_key.dtype == torch.int32
    assert [chunk.first_key for chunk in plain.chunks] == [None, None]
    (together,) = cut_batch(batch, 1, even(6, 1))
    assert together.chunks[0].first_key.tolist() == [[0, 0, 0, 3, 3, 5], [0] * 6]
    padded = {**batch, "attention_mask": mask([1, 1, 1, 0, 0, 0], [1] * 6)}
    assert {chunk.first_key for part in cut_batch(padded, None, even(6, 2)) for chunk in part.chunks} == {None}


def test_one_row_of_positions_is_that_of_all():
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.long), "position_ids": mask([0, 1, 0, 1])}
    cut = cut_groups(batch, (RowGroup((1, 0), 4),), (even(4, 1),))
    assert cut[0].chunks[0].first_key.tolist() == [[0, 0, 2, 2]] * 2
    assert cut[0].chunks[0].position_ids.tolist() == [[0, 1, 0, 1]] * 2


def test_loss_weights_move_with_the_labels():
    batch = {**ragged(), "loss_weights": torch.arange(18.0).view(3, 6)}
    (cut,) = cut_batch(batch, 1, even(6, 1))
    assert torch.equal(cut.chunks[0].extras["loss_weights"][:, :-1], batch["loss_weights"][:, 1:])
    assert (cut.chunks[0].extras["loss_weights"][:, -1] == 0).all()
