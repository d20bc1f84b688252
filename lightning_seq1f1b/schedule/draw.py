"""Draws a timeline in the terminal: one row for each rank, time to the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.timeline import Event, Time

LEGEND = "a0 forward of microbatch a, chunk 0 (goes on ---)   A0 its backward (goes on ===)   . idle"
"""What the signs of a drawing mean."""

_MOST_COLUMNS = 4096


def draw(timeline: Iterable[Event], num_ranks: int, width: int = 120) -> str:
    """Draw the compute actions of a timeline, true to scale, so that the shortest one has room for its label.

    Forwards are lower case, backwards upper case: `b2` is the forward of microbatch 1, chunk 2, and `B2` its backward.
    What does not fit into `width` columns goes on in another band below.

        rank 0  a0a1b0....A1==b1A0==..B1==B0==
        rank 1  ..a0a1A1==b0A0==b1B1==B0==....

    Args:
        timeline: what to draw; actions that do not compute are left out.
        num_ranks: rows to draw.
        width: columns of the terminal.

    Raises:
        ValueError: if no action takes time.
    """
    events = [event for event in timeline if event.action.computes and event.end > event.start]
    if not events:
        raise ValueError("there is nothing to draw: no action of the timeline takes time")
    first = min(event.start for event in events)
    length = max(event.end for event in events) - first
    longest_label = max(len(_label(event.action)) for event in events)
    per_column = max(min(event.end - event.start for event in events) / longest_label, length / _MOST_COLUMNS)

    rows = [["."] * ceil(length / per_column) for _ in range(num_ranks)]
    for event in events:
        start, stop = (round((time - first) / per_column) for time in (event.start, event.end))
        rows[event.rank][start:stop] = _cell(event.action, stop - start)
    return "\n\n".join(_bands(["".join(row) for row in rows], first, per_column, width))


def _bands(rows: Sequence[str], first: Time, per_column: Time, width: int) -> list[str]:
    names = [f"rank {rank}" for rank in range(len(rows))]
    margin = max(map(len, names)) + 2
    room = max(width - margin, 1)
    bands = []
    for start in range(0, len(rows[0]), room):
        lines = [name.ljust(margin) + row[start : start + room] for name, row in zip(names, rows, strict=True)]
        if len(rows[0]) > room:
            lines.insert(0, f"from time {float(first + start * per_column):g}")
        bands.append("\n".join(lines))
    return bands


def _cell(action: Action, columns: int) -> str:
    filler = "-" if action.kind is Kind.F else "="
    return _label(action)[:columns].ljust(columns, filler)


def _label(action: Action) -> str:
    letters = microbatch_letters(action.unit.microbatch)
    return f"{letters if action.kind is Kind.F else letters.upper()}{action.unit.chunk}"


def microbatch_letters(index: int) -> str:
    """The name of a microbatch in a drawing: a, b, ... z, aa, ab, ..."""
    letters = ""
    while index >= 0:
        index, letter = divmod(index, 26)
        letters = chr(ord("a") + letter) + letters
        index -= 1
    return letters
