"""Cut a batch into microbatches along the samples, and every microbatch into chunks along the sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_seq1f1b.runtime.documents import document_starts, first_tokens, padding_documents
from lightning_seq1f1b.runtime.needs import Needs, needs_of
from lightning_seq1f1b.runtime.row_groups import RowGroup, split_rows
from lightning_seq1f1b.schedule.actions import Unit
from lightning_seq1f1b.schedule.spans import Span

IGNORE_INDEX = -100
"""The label of a token that is not supervised, as in `torch.nn.functional.cross_entropy` and transformers."""

_KNOWN = ("input_ids", "labels", "attention_mask", "position_ids", "num_items_in_batch")


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
        real: [rows, tokens], bool, false for padding; None when the batch has no mask.
        labels: [rows, tokens], int64, already shifted: `labels[:, t]` is the target of the prediction made at token t.
            None when the batch has no labels.
        loss_denominator: 0-d tensor, int64 when counted here; the sum of token losses is divided by it. It counts the
            whole batch.
        first_key: [rows, tokens], int32: the place in its row of the first token of every token's document, before
            which it attends to nothing; None when no row is packed with several documents.
        extras: what else the batch has for every token, [rows, tokens, ...], by name; "loss_weights" are shifted like
            the labels.
    """

    unit: Unit
    span: Span
    length: int
    input_ids: Tensor
    position_ids: Tensor | None
    attention_mask: Tensor | None
    real: Tensor | None
    labels: Tensor | None
    loss_denominator: Tensor
    first_key: Tensor | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Some rows of the batch, cut into chunks.

    Attributes:
        index: its place among the microbatches.
        rows: how many.
        length: tokens of each row; padding behind them was left out.
        chunks: the rows, piece by piece along the sequence.
        last_position: 0-d int64, the largest position of the whole batch, which some rotary embeddings depend on.
        rows_of_batch: which rows of the batch these are, in their order here.
    """

    index: int
    rows: int
    length: int
    chunks: tuple[Chunk, ...]
    last_position: Tensor
    rows_of_batch: tuple[int, ...]


def shift_labels(labels: Tensor) -> Tensor:
    """Move every target to the token that predicts it: [rows, length] -> [rows, length]; the last column is ignored.

    Done once on whole rows, before cutting, so that no chunk border loses a target.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def row_ends(batch: Mapping[str, Tensor], *, labels_alone_count: bool = True) -> list[int]:
    """How many tokens of every row have to be computed: all but the padding at its end, and 1 at least.

    Padding is what the mask says; without a mask, documents of one token each at the end of a packed row. What is
    supervised is never left out.

    Args:
        batch: as for `cut_groups`.
        labels_alone_count: whether nobody looks at tokens without a label. Otherwise only a mask tells what is padding:
            a document of one token at the end of a packed row may be one that somebody wants to know the logits of.
    """
    rows, length = batch["input_ids"].shape
    mask, positions, labels = (batch.get(name) for name in ("attention_mask", "position_ids", "labels"))
    if mask is not None:
        ends = _ends(mask.bool())
    elif positions is not None and labels_alone_count:
        ends = length - padding_documents(document_starts(positions)).expand(rows)
    else:
        return [length] * rows
    if labels is not None:
        ends = torch.maximum(ends, _ends(shift_labels(labels) != IGNORE_INDEX))
    # One copy from the device for all rows.
    return [max(int(end), 1) for end in ends.tolist()]


def _ends(counts: Tensor) -> Tensor:
    """One past the last true of every row, 0 where there is none: [rows, length], bool -> [rows]."""
    places = torch.arange(1, counts.shape[1] + 1, device=counts.device)
    return torch.where(counts, places, 0).amax(dim=1)


def cut_batch(
    batch: Mapping[str, Tensor], num_microbatches: int | None, spans: Sequence[Span]
) -> tuple[Microbatch, ...]:
    """Cut a batch into microbatches and chunks that are all alike, padding included.

    Args:
        batch: as for `cut_groups`.
        num_microbatches: at most this many; None for one row each.
        spans: the chunks' token ranges; they cover the length without a gap.

    Returns:
        The microbatches, in the order of their rows.
    """
    rows, length = batch["input_ids"].shape
    groups = [RowGroup(tuple(range(*bounds)), length) for bounds in split_rows(rows, num_microbatches)]
    return cut_groups(batch, groups, [spans] * len(groups))


def cut_groups(
    batch: Mapping[str, Tensor], groups: Sequence[RowGroup], spans: Sequence[Sequence[Span]]
) -> tuple[Microbatch, ...]:
    """Cut a batch into microbatches of given rows and lengths, and each of them into chunks of its own.

    Args:
        batch: `input_ids` [rows, length]; optionally `labels` [rows, length] (not shifted), `attention_mask`
            [rows, length], `position_ids` [rows, length] or [1, length], `num_items_in_batch` (a number, or a 0-d
            tensor) that replaces the count of supervised tokens as the loss's denominator, and whatever else there is
            for every token, [rows, length, ...]. Positions that restart, without a mask, mark packed documents.
        groups: the rows of every microbatch, and how many of their tokens are computed.
        spans: for every microbatch the chunks' token ranges; they cover its length without a gap.

    Returns:
        The microbatches, in the order of `groups`. Sums of chunk losses over all of them equal the batch's loss.
    """
    input_ids, labels = batch["input_ids"], batch.get("labels")
    rows, length = input_ids.shape
    shifted = None if labels is None else shift_labels(labels)
    padding, positions = batch.get("attention_mask"), batch.get("position_ids")
    counted = torch.arange(length, device=input_ids.device)[None]
    last_position = (counted if positions is None else positions).max()
    first_key = None
    if positions is not None and padding is None:
        first_key = first_tokens(document_starts(positions)).expand(rows, length)
    denominator = loss_denominator(shifted, batch.get("num_items_in_batch"), input_ids.device)
    extras = {name: tensor for name, tensor in batch.items() if name not in _KNOWN}
    if "loss_weights" in extras:
        extras["loss_weights"] = F.pad(extras["loss_weights"][:, 1:], (0, 1))

    supervised = None if shifted is None else shifted != IGNORE_INDEX
    needs = needs_of(groups, padding, supervised, first_key)

    def microbatch(index: int, group: RowGroup, spans: Sequence[Span], needs: Needs) -> Microbatch:
        if spans[0].start != 0 or spans[-1].stop != group.length:
            raise ValueError(
                f"chunks cover tokens {spans[0].start} to {spans[-1].stop}, but the rows have {group.length} tokens"
            )
        rows_of_batch = _places(group.rows)

        def of_rows(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows_of_batch, : group.length]

        own_labels, own_padding = of_rows(shifted), of_rows(padding)
        mask = own_padding if needs.mask else None
        # Under a mask some families count real tokens only; the model knows, and has the whole mask.
        given = counted if positions is None and mask is None else positions
        own_positions = None if given is None else of_rows(given.expand(rows, length))
        own_first_key = of_rows(first_key) if needs.borders else None

        def chunk(number: int, span: Span) -> Chunk:
            tokens = slice(span.start, span.stop)

            def piece(tensor: Tensor | None) -> Tensor | None:
                return None if tensor is None else tensor[:, tokens].contiguous()

            return Chunk(
                unit=Unit(index, number),
                span=span,
                length=group.length,
                input_ids=input_ids[rows_of_batch, tokens].contiguous(),
                position_ids=piece(own_positions),
                attention_mask=None if mask is None else mask[:, : span.stop].contiguous(),
                real=None if own_padding is None else own_padding[:, tokens].bool(),
                labels=piece(own_labels),
                loss_denominator=denominator,
                first_key=piece(own_first_key),
                extras={name: tensor[rows_of_batch, tokens].contiguous() for name, tensor in extras.items()},
            )

        chunks = tuple(chunk(number, span) for number, span in enumerate(spans))
        return Microbatch(index, len(group.rows), group.length, chunks, last_position, group.rows)

    return tuple(microbatch(index, *cut) for index, cut in enumerate(zip(groups, spans, needs, strict=True)))


def _places(rows: tuple[int, ...]) -> slice | list[int]:
    """An index of the rows: a slice, which copies nothing, where they are neighbours in their order."""
    first, stop = rows[0], rows[0] + len(rows)
    return slice(first, stop) if rows == tuple(range(first, stop)) else list(rows)


def loss_denominator(shifted: Tensor | None, num_items: Tensor | float | None, device: torch.device) -> Tensor:
    """What the sum of token losses is divided by: `num_items`, else the number of supervised tokens; 1 in place of 0.

    So a batch without a supervised token has loss 0, not NaN.
    """
    if num_items is not None:
        given = torch.as_tensor(num_items, device=device)
        return torch.where(given == 0, torch.ones_like(given), given)
    if shifted is None:
        return torch.ones((), dtype=torch.int64, device=device)
    return (shifted != IGNORE_INDEX).sum().clamp(min=1)
