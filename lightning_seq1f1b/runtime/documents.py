"""Rows packed with several documents: where each begins, read off positions that restart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def document_starts(position_ids: Tensor) -> Tensor:
    """Where documents begin: [rows, length] -> [rows, length], bool.

    As for transformers, a token whose position is not one more than that of the token before it begins a document, and
    so does the first token of a row.
    """
    return F.pad(position_ids.diff(dim=1) != 1, (1, 0), value=True)


def first_tokens(starts: Tensor) -> Tensor:
    """For every token the place in its row of its document's first: [rows, length], bool -> int32."""
    places = torch.arange(starts.shape[1], device=starts.device)
    return torch.where(starts, places, 0).cummax(dim=1).values.int()


def padding_documents(starts: Tensor) -> Tensor:
    """How many tokens at the end of every row are documents of one token each: [rows, length], bool -> [rows].

    Where nobody attends to other documents and a document's first token is nobody's target, such tokens change nothing:
    it is how rows without a mask are padded. A row that is nothing else keeps its first token.
    """
    single = starts & F.pad(starts[:, 1:], (0, 1), value=True)
    trailing = single.flip(1).long().cumprod(dim=1).sum(dim=1)
    return trailing.clamp(max=starts.shape[1] - 1)
