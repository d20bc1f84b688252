"""No token is lost or supervised twice, masks are exactly the answers, and padding never counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.byte_tokenizer import byte_tokenizer

from lightning_seq1f1b.cli.reading import Document
from lightning_seq1f1b.cli.rows import Row, TokenizedDocument, cut, pad_rows, tokenize
from lightning_seq1f1b.runtime.batching import IGNORE_INDEX, shift_labels

BOS, EOS = 1, 2
PLAIN = byte_tokenizer()
WITH_BOS = byte_tokenizer(with_bos=True)


def document_of(num_tokens: int, num_prompt: int = 0) -> TokenizedDocument:
    """A document whose tokens are all different, so that a place can be told by its token."""
    return TokenizedDocument(torch.arange(10, 10 + num_tokens, dtype=torch.int32), num_prompt)


def targets(rows: list[Row], length: int, pad_id: int) -> list[int]:
    """Every token that a batch of the rows asks a model to predict, by the shift that models apply."""
    shifted = shift_labels(pad_rows(rows, length, pad_id)["labels"])
    return shifted[shifted != IGNORE_INDEX].tolist()


@given(num_tokens=st.integers(0, 60), length=st.integers(2, 20))
def test_every_token_but_the_first_is_predicted_once(num_tokens, length):
    document = document_of(num_tokens)
    rows = list(cut(document, length))
    assert targets(rows, length, pad_id=0) == document.ids[1:].tolist()
    assert all(len(row.ids) == length for row in rows[:-1])


@given(num_tokens=st.integers(1, 60), length=st.integers(2, 20))
def test_a_prediction_sees_the_tokens_before_it_in_the_document(num_tokens, length):
    """The row around a target has the document's tokens in their order, whatever the padding and the row borders."""
    document = document_of(num_tokens)
    for row in cut(document, length):
        start = int(row.ids[0]) - 10
        assert row.ids.tolist() == document.ids[start : start + len(row.ids)].tolist()


@given(num_tokens=st.integers(0, 60), length=st.integers(2, 20), num_prompt=st.integers(0, 60))
def test_prompts_are_never_targets_and_answers_always(num_tokens, length, num_prompt):
    document = document_of(num_tokens, num_prompt)
    expected = document.ids[max(1, num_prompt) :].tolist()
    assert targets(list(cut(document, length)), length, pad_id=0) == expected


@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=5),
    pad_id=st.integers(0, 90),
)
def test_padding_is_masked_and_not_supervised(lengths, pad_id):
    rows = [row for tokens in lengths for row in cut(document_of(tokens), 12)]
    batch = pad_rows(rows, 12, pad_id)
    real = batch["attention_mask"].bool()
    assert real.sum(1).tolist() == [len(row.ids) for row in rows]
    assert (real[:, 1:] <= real[:, :-1]).all(), "padding stands at the right"
    assert (batch["labels"][~real] == IGNORE_INDEX).all()
    assert (batch["input_ids"][~real] == pad_id).all()
    assert {name: tensor.dtype for name, tensor in batch.items()} == dict.fromkeys(batch, torch.int64)
    assert {tensor.shape for tensor in batch.values()} == {(len(rows), 12)}


@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=4))
def test_tokens_are_the_documents_with_an_end(texts):
    for text, document in zip(texts, tokenize([Document(text) for text in texts], PLAIN, append_eos=True), strict=True):
        assert document.ids[-1] == EOS
        assert PLAIN.decode(document.ids[:-1]) == text
        assert document.num_prompt == 0


@given(prompt=st.text(max_size=20), answer=st.text(max_size=20))
def test_the_loss_mask_is_exactly_the_answer(prompt, answer):
    for tokenizer, num_bos in ((PLAIN, 0), (WITH_BOS, 1)):
        (document,) = tokenize([Document(answer, prompt=prompt)], tokenizer, append_eos=True)
        assert document.num_prompt == num_bos + len(prompt.encode())
        assert tokenizer.decode(document.ids[num_bos : document.num_prompt]) == prompt
        assert tokenizer.decode(document.ids[document.num_prompt : -1]) == answer


def test_the_beginning_token_is_there_where_the_tokenizer_puts_it():
    assert tokenize([Document("ab")], WITH_BOS, append_eos=False)[0].ids[0] == BOS
    assert len(tokenize([Document("ab")], PLAIN, append_eos=False)[0].ids) == 2
    assert len(tokenize([Document("ab")], WITH_BOS, append_eos=True)[0].ids) == 4


def test_a_beginning_token_is_no_answer():
    """An answer without a prompt text still follows the beginning token, which is not supervised."""
    (document,) = tokenize([Document("ab", prompt="")], WITH_BOS, append_eos=False)
    assert document.num_prompt == 1


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_document_with_nothing_to_predict_makes_no_row(num_tokens):
    assert list(cut(document_of(num_tokens), 8)) == []
