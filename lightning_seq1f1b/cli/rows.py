"""Turn documents into token rows, and rows into batches: labels, loss masks, packing, padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_seq1f1b.cli.reading import Document
from lightning_seq1f1b.runtime.batching import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class TokenizedDocument:
    """A whole document.

    Attributes:
        ids: [tokens], int32.
        num_prompt: how many tokens at the start are not supervised.
    """

    ids: Tensor
    num_prompt: int


@dataclass(frozen=True, eq=False)
class Row:
    """A piece of a document, at most a row long, or several packed together.

    Attributes:
        ids: [tokens], int32.
        labels: [tokens], int32: the id where the token is supervised, else -100.
        packed: tokens of each document, where there are several.
    """

    ids: Tensor
    labels: Tensor
    packed: tuple[int, ...] = ()


def tokenize(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase, *, append_eos: bool
) -> list[TokenizedDocument]:
    """Tokenize documents.

    A document starts with the tokenizer's beginning-of-sequence token where the tokenizer itself puts one. Prompt and
    answer are tokenized apart, so that the border of the loss mask never falls inside a token.

    Args:
        documents: the documents.
        tokenizer: a tokenizer of transformers.
        append_eos: end every document with the end-of-sequence token, if the tokenizer has one.
    """
    begin = [tokenizer.bos_token_id] if _begins_with_bos(tokenizer) else []
    end = [tokenizer.eos_token_id] if append_eos and tokenizer.eos_token_id is not None else []
    prompts = _ids([document.prompt or "" for document in documents], tokenizer)
    texts = _ids([document.text for document in documents], tokenizer)
    tokenized = []
    for document, prompt, text in zip(documents, prompts, texts, strict=True):
        num_prompt = len(begin) + len(prompt) if document.prompt is not None else 0
        ids = torch.tensor([*begin, *prompt, *text, *end], dtype=torch.int32)
        tokenized.append(TokenizedDocument(ids, num_prompt))
    return tokenized


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    # verbose=False: documents longer than the tokenizer's model_max_length are what this is for, and they are cut.
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _begins_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    if tokenizer.bos_token_id is None:
        return False
    ids = tokenizer("a", add_special_tokens=True)["input_ids"]
    return bool(ids) and ids[0] == tokenizer.bos_token_id


def cut(document: TokenizedDocument, length: int) -> Iterator[Row]:
    """Cut a document into rows of at most `length` tokens, `length` >= 2, every row but the last that long.

    Neighbouring rows share one token, the last of the one and the first of the other: the first token of a row is
    nobody's target, so without it the row border would hide a token from the loss. So every token but the document's
    first is the target of exactly one prediction. Rows without a supervised target are left out.
    """
    labels = document.ids.clone()
    labels[: document.num_prompt] = IGNORE_INDEX
    for row in pieces(Row(document.ids, labels), length):
        if bool((row.labels[1:] != IGNORE_INDEX).any()):
            yield row


def pieces(document: Row, length: int) -> Iterator[Row]:
    """Rows of at most `length` tokens, as in `cut`, supervised or not; none of a document of one token."""
    for start in range(0, len(document.ids) - 1, length - 1):
        yield Row(document.ids[start : start + length], document.labels[start : start + length])


def joined(documents: Sequence[Row]) -> Row:
    """One row of several documents, none of whose first tokens is supervised: nothing of its document is before it."""
    labels = torch.cat([document.labels for document in documents])
    lengths = tuple(len(document.ids) for document in documents)
    labels[[sum(lengths[:index]) for index in range(len(lengths))]] = IGNORE_INDEX
    return Row(torch.cat([document.ids for document in documents]), labels, lengths)


def pad_rows(rows: Iterable[Row], length: int | None, pad_id: int) -> dict[str, Tensor]:
    """A batch of rows, padded at the right.

    Args:
        rows: the rows, each of at most `length` tokens.
        length: tokens of every row of the batch; None for those of its longest.
        pad_id: the token to pad with. Its labels are -100 and its mask 0, so any id of the vocabulary is exact.

    Returns:
        `input_ids`, `attention_mask` (1 for a real token) and `labels` (-100 where not supervised; not shifted), each
        [rows, length], int64.
    """
    rows = list(rows)
    ids, labels = _padded(rows, length, pad_id)
    attention_mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        attention_mask[index, : len(row.ids)] = 1
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def pad_packed_rows(rows: Iterable[Row], length: int | None, pad_id: int) -> dict[str, Tensor]:
    """A batch of packed rows, padded at the right.

    Args:
        rows: as in `pad_rows`.
        length: as in `pad_rows`.
        pad_id: as in `pad_rows`.

    Returns:
        `input_ids`, `position_ids` (from 0 in every document; 0 for padding) and `labels`, each [rows, length], int64.
        No mask, beside which transformers would not look at the positions.
    """
    rows = list(rows)
    ids, labels = _padded(rows, length, pad_id)
    positions = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        positions[index, : len(row.ids)] = torch.cat([torch.arange(tokens) for tokens in row.packed or (len(row.ids),)])
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def _padded(rows: Sequence[Row], length: int | None, pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and labels."""
    shape = (len(rows), max(len(row.ids) for row in rows) if length is None else length)
    ids = torch.full(shape, pad_id, dtype=torch.int64)
    labels = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens = len(row.ids)
        ids[index, :tokens] = row.ids
        labels[index, :tokens] = row.labels
    return ids, labels
