"""Which microbatches need their padding mask and their documents' borders, asked of the device once for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_seq1f1b.runtime.row_groups import RowGroup


class Needs(NamedTuple):
    """What of a batch a microbatch needs; without it attention keeps its fast path.

    Attributes:
        mask: whether dropping the mask would change a supervised token's loss. It would not where nothing is padded, or
            where all padding stands at the right and none of it is supervised: causal attention already hides what
            comes later.
        borders: whether some row holds more than one document.
    """

    mask: bool = False
    borders: bool = False


def needs_of(
    groups: Sequence[RowGroup], attention_mask: Tensor | None, supervised: Tensor | None, first_key: Tensor | None
) -> list[Needs]:
    """The needs of every microbatch.

    Args:
        groups: the rows of every microbatch, and how many of their tokens are computed.
        attention_mask: [rows, length] of the batch, 1 for a real token.
        supervised: [rows, length], bool: tokens whose prediction counts; None when nobody knows.
        first_key: [rows, length]: the place of the first token of every token's document.
    """
    given = next((tensor for tensor in (attention_mask, first_key) if tensor is not None), None)
    if given is None:
        return [Needs()] * len(groups)
    rows, length = given.shape
    lengths = [length] * rows
    for group in groups:
        for row in group.rows:
            lengths[row] = group.length
    places = torch.arange(length, device=given.device)
    counts = places < torch.tensor(lengths, device=given.device)[:, None]
    none = torch.zeros(rows, dtype=torch.bool, device=given.device)
    wanted = several = none
    if attention_mask is not None:
        real = attention_mask.bool()
        padding = ~real & counts
        not_at_right = padding[:, :-1] & real[:, 1:] & counts[:, 1:]
        seen = padding if supervised is None else padding & supervised
        wanted = not_at_right.any(dim=1) | seen.any(dim=1)
    if first_key is not None:
        several = (first_key.bool() & counts).any(dim=1)
    # One copy from the device for all microbatches.
    mask, borders = torch.stack([wanted, several]).tolist()
    return [Needs(any(mask[row] for row in group.rows), any(borders[row] for row in group.rows)) for group in groups]
