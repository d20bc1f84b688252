"""The error of a plan that cannot run: it shows the ranks' actions with the offending cell marked."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_seq1f1b.schedule.codes import Codes

_RANKS_AROUND = 4
_ACTIONS_AROUND = 4


class PlanError(ValueError):
    """A plan is incomplete, out of order, mismatched between ranks, or stalls.

    Args:
        reason: what is wrong.
        rows: codes of all actions of every rank, in order.
        codes: the numbering.
        rank: the rank of the offending cell.
        index: the place of the offending cell among the rank's actions; one past the end marks the end of the row.
    """

    def __init__(self, reason: str, rows: Sequence[Sequence[int]], codes: Codes, rank: int, index: int) -> None:
        super().__init__(f"{reason}\n\n{draw_around(rows, codes, rank, index)}")
        self.reason = reason
        self.rank = rank
        self.index = index


def draw_around(rows: Sequence[Sequence[int]], codes: Codes, rank: int, index: int) -> str:
    """Draw the actions near a cell, one row for each rank, the cell itself between `>` and `<`.

    rank 0 |    0F0.0 0SEND_F0.0   >0F0.2<  0SEND_F0.2
    rank 1 |    ...
    """
    ranks = range(max(0, rank - _RANKS_AROUND), min(len(rows), rank + _RANKS_AROUND + 1))
    columns = range(max(0, index - _ACTIONS_AROUND), index + _ACTIONS_AROUND + 1)
    cells = [
        [_cell(rows[row], codes, column, marked=(row, column) == (rank, index)) for column in columns] for row in ranks
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    names = [f"rank {row}" for row in ranks]
    before = "... " if columns.start > 0 else ""
    return "\n".join(
        f"{name:>{max(map(len, names))}} | {before}"
        + " ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        + (" ..." if len(rows[row]) > columns.stop else "")
        for row, name, line in zip(ranks, names, cells, strict=True)
    )


def _cell(row: Sequence[int], codes: Codes, index: int, *, marked: bool) -> str:
    text = str(codes.decode(row[index])) if index < len(row) else "end" if marked else ""
    return f">{text}<" if marked else text
