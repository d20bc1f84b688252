"""Which rows of a batch make a microbatch: rows of similar length together, the longest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RowGroup:
    """The rows of one microbatch.

    Attributes:
        rows: their places in the batch.
        length: tokens of each that are computed; what follows is padding.
    """

    rows: tuple[int, ...]
    length: int


def split_rows(rows: int, num_microbatches: int | None) -> tuple[tuple[int, int], ...]:
    """Row ranges of the microbatches: as even as possible, never empty; None asks for one row each.

    A batch with fewer rows than `num_microbatches` (an epoch's last one) becomes one microbatch a row.
    """
    count = rows if num_microbatches is None else min(num_microbatches, rows)
    return tuple((index * rows // count, (index + 1) * rows // count) for index in range(count))


def group_rows(ends: Sequence[int], num_microbatches: int | None, together: int = 1) -> tuple[RowGroup, ...]:
    """The microbatches of a batch, longest first; rows of equal length keep their order.

    Args:
        ends: of every row how many tokens are computed.
        num_microbatches: at most this many; None for one row each, or `together` rows.
        together: so many neighbouring rows share a microbatch; a divisor of the number of rows.
    """
    blocks = [tuple(range(first, first + together)) for first in range(0, len(ends), together)]
    blocks.sort(key=lambda block: -max(ends[row] for row in block))
    return tuple(
        RowGroup(tuple(row for block in blocks[first:last] for row in block), max(ends[row] for row in blocks[first]))
        for first, last in split_rows(len(blocks), num_microbatches)
    )
