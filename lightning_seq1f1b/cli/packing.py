"""Packs documents of different lengths into rows: which go together, and the collator that users give a DataLoader."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_seq1f1b.cli.rows import Row, joined, pad_packed_rows, pieces


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Share documents out over rows: longest first, each into the fullest row that has room (best-fit decreasing).

    It needs at most 11/9 of the fewest rows that suffice, and one (Johnson, "Near-optimal bin packing algorithms",
    1973). The result depends on the lengths and their order alone.

    Args:
        lengths: tokens of every document.
        capacity: tokens of a row; a longer document gets a row to itself.

    Returns:
        For every row the indices of its documents.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room that is left, row), in order
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(free, (lengths[index], -1))
        room, row = free.pop(place) if place < len(free) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        if room > lengths[index]:
            insort(free, (room - lengths[index], row))
    return rows


def packed(documents: Sequence[Row], length: int) -> list[Row]:
    """Documents in as few rows as `best_fit` finds."""
    shares = best_fit([len(document.ids) for document in documents], length)
    return [joined([documents[index] for index in share]) for share in shares]


class PackingCollator:
    """Makes a batch of documents: short ones share a row, so that little is padded; for a DataLoader's `collate_fn`.

    A document is told from the next by its positions, which start at 0, as on one device for transformers without an
    `attention_mask`. Its first token has no label, so that nobody predicts it from another document. A row that is
    shorter than the longest is padded at the right with documents of one token each, which costs nothing in a pipeline.
    The same documents give the same batch.

    Args:
        length: tokens of a row, at least 2.
        long_documents: what becomes of a document that is longer: "whole" gives it a row to itself, "cut" makes pieces
            of `length` tokens of it, in which every token but its first is predicted once.
        pad_id: the token to pad with; any of the vocabulary.

    Raises:
        ValueError: `length` or `long_documents` cannot be.
    """

    def __init__(self, length: int, long_documents: Literal["whole", "cut"] = "whole", pad_id: int = 0) -> None:
        if length < 2:
            raise ValueError(f"length must be at least 2, a token and its target; got {length}")
        if long_documents not in ("whole", "cut"):
            raise ValueError(f"long_documents must be 'whole' or 'cut', not {long_documents!r}")
        self.length, self.long_documents, self.pad_id = length, long_documents, pad_id

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Pack documents.

        Args:
            features: for every document `input_ids`, [tokens], a tensor or a list; optionally `labels`, the same, -100
                where a token is not supervised and not shifted (the tokens by default), and `attention_mask`, whose
                zeros are left out.

        Returns:
            `input_ids`, `position_ids` and `labels`, each [rows, tokens of the longest row], int64; no mask.

        Raises:
            ValueError: no document has a token, or its labels are not as many as its tokens.
        """
        documents = [document for feature in features for document in self._pieces(feature)]
        if not documents:
            raise ValueError(f"none of the {len(features)} document(s) of the batch has a token")
        return pad_packed_rows(packed(documents, self.length), None, self.pad_id)

    def _pieces(self, feature: Mapping[str, Any]) -> list[Row]:
        ids = torch.as_tensor(feature["input_ids"]).int()
        labels = torch.as_tensor(feature.get("labels", ids)).int()
        if ids.ndim != 1 or labels.shape != ids.shape:
            raise ValueError(
                f"a document's input_ids are one list of tokens, and its labels as many; they have the shapes "
                f"{list(ids.shape)} and {list(labels.shape)}"
            )
        if "attention_mask" in feature:
            real = torch.as_tensor(feature["attention_mask"]).bool()
            ids, labels = ids[real], labels[real]
        if len(ids) > self.length and self.long_documents == "cut":
            return list(pieces(Row(ids, labels), self.length))
        return [Row(ids, labels)] if len(ids) else []
