"""Draws timelines in the terminal: one row for each rank, time to the right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from statistics import median_low

from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.timeline import Event, Time

LEGEND = "a0 forward of microbatch a, chunk 0 (goes on ---)   A0 its backward (goes on ===)   . idle"
"""What the signs mean in a drawing with one stage on each rank and backwards that are not split."""

_FILLER = {Kind.F: "-", Kind.B: "=", Kind.I: "=", Kind.W: "~"}

_MOST_COLUMNS = 4096

_SHORTEST_SHARE = 8
"""An action that is this many times too short for its label, the others being the measure, does not set the scale."""


def draw(timeline: Iterable[Event], num_ranks: int, width: int = 120) -> str:
    """Draw the compute actions of a timeline, true to scale, so that the shortest one has room for its label.

    Forwards are lower case, backwards upper case: `b2` is the forward of microbatch 1, chunk 2, and `B2` its backward.
    What does not fit into `width` columns goes on in another band below.

        rank 0  a0a1b0....A1==b1A0==..B1==B0==
        rank 1  ..a0a1A1==b0A0==b1B1==B0==....

    Of a split backward, the input gradient (I) is drawn like a backward, the weight gradients (W) as `b2~` and on with
    `~`. Where a rank has several stages, those of its second stage carry `'`, of its third `"`, of its fourth `:3`:

        rank 0  a0--a1--a0'-a1'-........A1'=A0'=A1==A0==a1'~a0'~a1~~a0~~
        rank 1  ....a0--a1--a0'-a1'-A1'=A0'=A1==A0==a1'~a0'~a1~~a0~~....

    Args:
        timeline: what to draw; actions that do not compute are left out.
        num_ranks: rows to draw; stage s lies on rank s % num_ranks, and is its stage number s // num_ranks.
        width: columns of the terminal.

    Raises:
        ValueError: if no action takes time.
    """
    return draw_together({"": timeline}, num_ranks, width)


def draw_together(timelines: Mapping[str, Iterable[Event]], num_ranks: int, width: int = 120) -> str:
    """Draw timelines above each other, on one time axis.

    Args:
        timelines: what to draw, all in the same unit of time, under the name that stands above it. A nameless one
            has no line above it. Where there are several, each of them starts at time 0.
        num_ranks: rows to draw for each.
        width: columns of the terminal.

    Raises:
        ValueError: if one of the timelines has no action that takes time.
    """
    drawn = {
        name: [event for event in timeline if event.action.computes and event.end > event.start]
        for name, timeline in timelines.items()
    }
    if not all(drawn.values()):
        raise ValueError("there is nothing to draw: no action of the timeline takes time")
    firsts = {name: min(event.start for event in events) for name, events in drawn.items()}
    length = max(event.end - firsts[name] for name, events in drawn.items() for event in events)
    rooms = [
        (event.end - event.start) / len(_label(event.action, num_ranks))
        for events in drawn.values()
        for event in events
    ]
    per_column = max(min(rooms), median_low(rooms) / _SHORTEST_SHARE, length / _MOST_COLUMNS)

    blocks = {}
    for name, events in drawn.items():
        rows = [["."] * ceil(length / per_column) for _ in range(num_ranks)]
        for event in events:
            start, stop = (round((time - firsts[name]) / per_column) for time in (event.start, event.end))
            rows[event.rank][start:stop] = _cell(event.action, num_ranks, stop - start)
        blocks[name] = ["".join(row) for row in rows]
    return _in_bands(blocks, firsts[""] if list(firsts) == [""] else 0, per_column, width)


def legend(timeline: Iterable[Event], num_ranks: int) -> str:
    """What the signs in a drawing of the timeline mean."""
    actions = [event.action for event in timeline]
    signs = [LEGEND]
    if any(action.kind is Kind.W for action in actions):
        backward = "its backward" if any(action.kind is Kind.B for action in actions) else "its input gradient"
        weights = "a0~ its weight gradients (goes on ~~~)"
        signs = [LEGEND.replace("its backward", backward).replace(". idle", f"{weights}   . idle")]
    local_stages = 1 + max((action.stage for action in actions), default=0) // num_ranks
    if local_stages > 1:
        marked = ", ".join(f"a0{_mark(stage)} on its stage {stage}" for stage in range(1, local_stages))
        signs.append(f"a0 on the rank's stage 0, {marked}")
    return "\n".join(signs)


def _in_bands(blocks: Mapping[str, Sequence[str]], first: Time, per_column: Time, width: int) -> str:
    num_ranks, columns = (len(next(iter(blocks.values()))), len(next(iter(blocks.values()))[0]))
    names = [f"rank {rank}" for rank in range(num_ranks)]
    margin = max(map(len, names)) + 2
    room = max(width - margin, 1)
    bands = []
    for start in range(0, columns, room):
        parts = []
        for title, rows in blocks.items():
            lines = [title] if title else []
            lines += [name.ljust(margin) + row[start : start + room] for name, row in zip(names, rows, strict=True)]
            parts.append("\n".join(lines))
        if columns > room:
            parts[0] = f"from time {float(first + start * per_column):g}\n{parts[0]}"
        bands += parts
    return "\n\n".join(bands)


def _cell(action: Action, num_ranks: int, columns: int) -> str:
    return _label(action, num_ranks)[:columns].ljust(columns, _FILLER[action.kind])


def _label(action: Action, num_ranks: int) -> str:
    letters = microbatch_letters(action.unit.microbatch)
    if action.kind in (Kind.B, Kind.I):
        letters = letters.upper()
    # Forwards and weight gradients are both lower case, so the latter have at least one of their filling signs.
    sign = _FILLER[Kind.W] if action.kind is Kind.W else ""
    return f"{letters}{action.unit.chunk}{_mark(action.stage // num_ranks)}{sign}"


def _mark(local_stage: int) -> str:
    """What tells the stages of one rank apart."""
    marks = ("", "'", '"')
    return marks[local_stage] if local_stage < len(marks) else f":{local_stage}"


def microbatch_letters(index: int) -> str:
    """The name of a microbatch in a drawing: a, b, ... z, aa, ab, ..."""
    letters = ""
    while index >= 0:
        index, letter = divmod(index, 26)
        letters = chr(ord("a") + letter) + letters
        index -= 1
    return letters
