"""Packing loses no document, mixes no two, and fills rows as well as is known of its method."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_models import tiny_batch

from lightning_seq1f1b import PackingCollator
from lightning_seq1f1b.cli.packing import best_fit
from lightning_seq1f1b.models.batch_checks import checked_batch
from lightning_seq1f1b.runtime.batching import IGNORE_INDEX, row_ends, shift_labels
from lightning_seq1f1b.runtime.documents import document_starts


def features(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Documents whose tokens are all different, also between them."""
    first, made = 100, []
    for length in lengths:
        made.append({"input_ids": list(range(first, first + length))})
        first += length
    return made


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40), capacity=st.integers(2, 30))
def test_every_document_is_in_one_row_and_no_row_is_too_full(lengths, capacity):
    rows = best_fit(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[index] for index in row) <= capacity or len(row) == 1


@given(cuts=st.lists(st.sets(st.integers(1, 49), max_size=5), min_size=1, max_size=15), random=st.randoms())
def test_rows_are_filled_as_the_bound_of_the_method_says(cuts, random):
    """Of full rows that were cut into pieces the fewest rows are known."""
    bounds = [[0, *sorted(places), 50] for places in cuts]
    lengths = [stop - start for row in bounds for start, stop in pairwise(row)]
    random.shuffle(lengths)
    assert len(best_fit(lengths, 50)) <= 11 / 9 * len(cuts) + 1


def test_the_fullest_row_that_has_room_is_taken():
    assert best_fit([6, 7, 3, 4], 10) == [[1, 2], [0, 3]]


@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=12),
    length=st.integers(2, 20),
    long_documents=st.sampled_from(["whole", "cut"]),
)
def test_every_token_but_the_first_is_predicted_once_from_its_own_document(lengths, length, long_documents):
    documents = features(lengths)
    batch = PackingCollator(length, long_documents)(documents)
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    longest = max(lengths) if long_documents == "whole" else min(max(lengths), length)
    assert batch["input_ids"].shape[1] <= max(length, longest)
    shifted = shift_labels(batch["labels"])
    supervised = shifted != IGNORE_INDEX
    wanted = [token for document in documents for token in document["input_ids"][1:]]
    assert sorted(shifted[supervised].tolist()) == wanted
    # A target is predicted at the token before it in its document, which is so marked by the positions.
    assert torch.equal(batch["input_ids"][supervised] + 1, shifted[supervised])
    assert not (document_starts(batch["position_ids"])[:, 1:] & supervised[:, :-1]).any()
    checked_batch(batch, None)  # what the pipeline accepts


def test_a_short_row_is_padded_where_the_pipeline_does_not_compute():
    batch = PackingCollator(8, pad_id=9)(features([8, 3, 2]))
    assert batch["input_ids"].tolist()[1] == [108, 109, 110, 111, 112, 9, 9, 9]
    assert batch["position_ids"].tolist()[1] == [0, 1, 2, 0, 1, 0, 0, 0]
    assert row_ends(batch) == [8, 5]


def test_labels_and_masks_of_documents_are_heeded():
    documents = [
        {"input_ids": torch.tensor([5, 6, 7]), "labels": torch.tensor([5, IGNORE_INDEX, 7])},
        {"input_ids": [0, 8, 9], "attention_mask": [0, 1, 1]},
    ]
    batch = PackingCollator(5)(documents)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX, IGNORE_INDEX, 7, IGNORE_INDEX, 9]]


def test_the_same_documents_give_the_same_batch():
    documents = features([3, 9, 3, 3, 7, 1])
    first, second = (PackingCollator(10)(documents) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="length must be at least 2"):
        PackingCollator(1)
    with pytest.raises(ValueError, match="long_documents must be 'whole' or 'cut', not 'both'"):
        PackingCollator(8, "both")
    with pytest.raises(ValueError, match=r"none of the 1 document\(s\) of the batch has a token"):
        PackingCollator(8)([{"input_ids": []}])
    with pytest.raises(ValueError, match=r"they have the shapes \[3\] and \[2\]"):
        PackingCollator(8)([{"input_ids": [1, 2, 3], "labels": [1, 2]}])
    with pytest.raises(ValueError, match=r"they have the shapes \[2, 48\]"):
        PackingCollator(8)([tiny_batch()])
