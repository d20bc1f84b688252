"""Cut a batch into microbatches along the samples, and every microbatch into chunks along the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_seq1f1b.schedule.actions import Unit
from lightning_seq1f1b.schedule.spans import Span

IGNORE_INDEX = -100
"""The label of a token that is not supervised, as in `torch.nn.functional.cross_entropy` and transformers."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """One unit's share of the batch. All tensors lie on the stage's device and are contiguous.

    Attributes:
        unit: which microbatch, which chunk of it.
        span: the chunk's token range in its rows.
        length: tokens of a whole row, all chunks together.
        input_ids: [rows, tokens], int64.
        position_ids: [rows, tokens], int64; None where the model derives them from the mask.
        attention_mask: [rows, span.stop], 1 for a real token, of the chunk and everything before it; None when no
            query that counts would see a padded key.
        labels: [rows, tokens], int64, already shifted: `labels[:, t]` is the target of the prediction made at token t.
            None when the batch has no labels.
        loss_denominator: 0-d tensor, int64 when counted here; the sum of token losses is divided by it. It counts the
            whole batch.
    """

    unit: Unit
    span: Span
    length: int
    input_ids: Tensor
    position_ids: Tensor | None
    attention_mask: Tensor | None
    labels: Tensor | None
    loss_denominator: Tensor


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Some rows of the batch, cut into chunks.

    Attributes:
        index: its place in the batch.
        rows: how many.
        length: tokens of each row.
        chunks: the rows, piece by piece along the sequence.
        last_position: 0-d int64, the largest position of the whole batch, which some rotary embeddings depend on.
    """

    index: int
    rows: int
    length: int
    chunks: tuple[Chunk, ...]
    last_position: Tensor


def shift_labels(labels: Tensor) -> Tensor:
    """Move every target to the token that predicts it: [rows, length] -> [rows, length]; the last column is ignored.

    Done once on whole rows, before cutting, so that no chunk border loses a target.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def split_rows(rows: int, num_microbatches: int | None) -> tuple[tuple[int, int], ...]:
    """Row ranges of the microbatches: as even as possible, never empty; None asks for one row each.

    A batch with fewer rows than `num_microbatches` (an epoch's last one) becomes one microbatch a row.
    """
    count = rows if num_microbatches is None else min(num_microbatches, rows)
    return tuple((index * rows // count, (index + 1) * rows // count) for index in range(count))


def needed_mask(attention_mask: Tensor | None, shifted: Tensor | None) -> Tensor | None:
    """The mask, or None when dropping it changes no supervised token's loss.

    That is so when nothing is padded, and when all padding stands at the right and none of it is supervised: causal
    attention already hides what comes later. Without a mask, attention keeps its fast path.
    """
    if attention_mask is None:
        return None
    real = attention_mask.bool()
    if bool(real.all()):
        return None
    right_padded = bool((real[:, 1:] <= real[:, :-1]).all())
    if right_padded and shifted is not None and bool((shifted[~real] == IGNORE_INDEX).all()):
        return None
    return attention_mask


def cut_batch(
    batch: Mapping[str, Tensor], num_microbatches: int | None, spans: Sequence[Span]
) -> tuple[Microbatch, ...]:
    """Cut a batch into microbatches and chunks.

    Args:
        batch: `input_ids` [rows, length]; optionally `labels` [rows, length] (not shifted), `attention_mask`
            [rows, length], `position_ids` [rows, length] or [1, length], and `num_items_in_batch` (a number, or a 0-d
            tensor) that replaces the count of supervised tokens as the loss's denominator.
        num_microbatches: at most this many; None for one row each.
        spans: the chunks' token ranges; they cover the length without a gap.

    Returns:
        The microbatches, in the order of their rows. Sums of chunk losses over all of them equal the batch's loss.
    """
    input_ids = batch["input_ids"]
    rows, length = input_ids.shape
    if spans[0].start != 0 or spans[-1].stop != length:
        raise ValueError(f"chunks cover tokens {spans[0].start} to {spans[-1].stop}, but the rows have {length} tokens")
    labels = batch.get("labels")
    shifted = None if labels is None else shift_labels(labels)
    mask = needed_mask(batch.get("attention_mask"), shifted)
    counted = torch.arange(length, device=input_ids.device)[None]
    # Under a mask some families count real tokens only; the model knows, and has the whole mask.
    positions = batch.get("position_ids", counted if mask is None else None)
    last_position = (counted if positions is None else positions).max()
    if positions is not None:
        positions = positions.expand(rows, length)
    denominator = loss_denominator(shifted, batch.get("num_items_in_batch"), input_ids.device)

    def chunk(microbatch: int, index: int, first: int, last: int) -> Chunk:
        span = spans[index]
        columns = slice(span.start, span.stop)
        return Chunk(
            unit=Unit(microbatch, index),
            span=span,
            length=length,
            input_ids=input_ids[first:last, columns].contiguous(),
            position_ids=None if positions is None else positions[first:last, columns].contiguous(),
            attention_mask=None if mask is None else mask[first:last, : span.stop].contiguous(),
            labels=None if shifted is None else shifted[first:last, columns].contiguous(),
            loss_denominator=denominator,
        )

    return tuple(
        Microbatch(
            index=index,
            rows=last - first,
            length=length,
            chunks=tuple(chunk(index, position, first, last) for position in range(len(spans))),
            last_position=last_position,
        )
        for index, (first, last) in enumerate(split_rows(rows, num_microbatches))
    )


def loss_denominator(shifted: Tensor | None, num_items: Tensor | float | None, device: torch.device) -> Tensor:
    """What the sum of token losses is divided by: `num_items`, else the number of supervised tokens, at least 1.

    At least 1, so that a batch without a supervised token has loss 0, not NaN.
    """
    if num_items is not None:
        return torch.as_tensor(num_items, device=device)
    if shifted is None:
        return torch.ones((), dtype=torch.int64, device=device)
    return (shifted != IGNORE_INDEX).sum().clamp(min=1)
