"""Timelines as figures: what every rank does over time, and below it what every rank holds. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lightning_seq1f1b.schedule.actions import Kind
from lightning_seq1f1b.schedule.draw import microbatch_letters
from lightning_seq1f1b.schedule.memory_curve import UnitSizes, memory_over_time
from lightning_seq1f1b.schedule.timeline import Event, bubble, makespan
from lightning_seq1f1b.schedule.timeline_file import Recording, one_or_each

COLOURS = {Kind.F: "#BFE0F5", Kind.W: "#E8951C", Kind.I: "#2F6DA8", Kind.B: "#14304F"}
"""From light to dark, to stay apart in greyscale; blues and an orange, to stay apart for the colour-blind."""

_MEANINGS = {
    Kind.F: "F: forward",
    Kind.B: "B: backward",
    Kind.I: "I: input gradient",
    Kind.W: "W: weight gradients",
}

_WIDTH = 14.0
_DRAWN_WIDTH = 12.2
_MEMORY_HEIGHT = 1.7
_BAR = 0.84
_MARK = 0.16
"""Heights of a bar and of the mark in it, as a share of a rank's row."""

_MOST_PATHS = 20_000
"""With more bars than this, they are pixels in an SVG file too: it would be unwieldy, and single bars are too thin."""

_MOST_LINES_NAMED = 8

_LINE_WIDTHS = (5.0, 0.8)
"""Of the first and the last rank's memory, which lies on top: where lines coincide, all of them are seen."""


def save_figure(path: str | PathLike[str], recordings: Mapping[str, Recording]) -> None:
    """Draw timelines above each other on one time axis, each with what its ranks hold, and write a file.

    Each timeline starts at 0. Where ranks have several stages, a mark in each bar stands at the bottom for the rank's
    stage 0, and higher for later ones.

    Args:
        path: the file; its suffix says the format (.svg, .png, .pdf).
        recordings: timelines in one unit of time, under the name which the figure gives them.

    Raises:
        ValueError: if there is nothing to draw, or matplotlib does not know the format.
    """
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "timeline", "font.size": 8}):
        # Without a date, the same timeline gives the same file.
        metadata = {"Date": None} if str(path).lower().endswith(".svg") else None
        figure(recordings).savefig(path, dpi=150, metadata=metadata)


def figure(recordings: Mapping[str, Recording]) -> Figure:
    """The figure that `save_figure` writes."""
    length = max(float(makespan(recording.events)) for recording in recordings.values())
    if not length:
        raise ValueError("there is nothing to draw: no action of the timeline takes time")
    heights = []
    for recording in recordings.values():
        heights += [0.3 + recording.num_ranks * np.interp(recording.num_ranks, (8, 64), (0.32, 0.15)), _MEMORY_HEIGHT]
    drawn = Figure(figsize=(_WIDTH, sum(heights) + 0.9), layout="constrained")
    axes = drawn.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for place, (name, recording) in enumerate(recordings.items()):
        first = min(event.start for event in recording.events)
        events = [Event(e.rank, e.action, float(e.start - first), float(e.end - first)) for e in recording.events]
        shown = replace(recording, events=tuple(events))
        _draw_work(axes[2 * place], shown)
        axes[2 * place].set_title(_title(name, shown), loc="left")
        _draw_memory(axes[2 * place + 1], shown)
    units = {recording.time_unit for recording in recordings.values()} - {None}
    axes[-1].set_xlabel(f"time ({' or '.join(sorted(map(str, units)))})" if units else "time")
    axes[-1].set_xlim(0, length)
    for place, recording in enumerate(recordings.values()):
        _label_bars(axes[2 * place], recording, length)
    drawn.legend(handles=_handles(list(recordings.values())), loc="outside upper right", ncols=6, frameon=False)
    return drawn


def _title(name: str, recording: Recording) -> str:
    length = float(makespan(recording.events))
    share = float(bubble(recording.events)) / length if length else 0.0
    ranks, stages = recording.num_ranks, recording.virtual_stages
    chunks = str(one_or_each(recording.chunks)).strip("()")
    counts = f"p = {ranks}, v = {stages}, m = {recording.num_microbatches}, k = {chunks}"
    if recording.memory_knob is not None:
        counts += f", j = {recording.memory_knob}"
    if recording.activation_cap is not None:
        counts += f", cap {recording.activation_cap}"
    schedule = f"{recording.schedule}, " if recording.schedule else ""
    unit = f" {recording.time_unit}" if recording.time_unit else ""
    return f"{name}: {schedule}{counts}; makespan {length:.4g}{unit}, bubble {share:.1%}"


def _draw_work(axes: Axes, recording: Recording) -> None:
    few = len(recording.events) <= _MOST_PATHS
    for kind, colour in COLOURS.items():
        events = [event for event in recording.events if event.action.kind is kind]
        if not events:
            continue
        spans = np.array([(event.start, event.end) for event in events], dtype=float)
        bottoms = np.array([event.rank - _BAR / 2 for event in events])
        edges = {"edgecolors": "white", "linewidths": 0.4} if few else {"linewidths": 0}
        axes.add_collection(
            PolyCollection(_boxes(spans, bottoms, _BAR), facecolors=colour, rasterized=not few, **edges)
        )
        if recording.virtual_stages > 1:
            # Rank 0 is on top, so the y axis points down.
            stages = np.array([event.action.stage // recording.num_ranks for event in events])
            step = (_BAR - _MARK) / (recording.virtual_stages - 1)
            marks = _boxes(spans, bottoms + (recording.virtual_stages - 1 - stages) * step, _MARK)
            axes.add_collection(
                PolyCollection(marks, facecolors=_mark_colour(colour), linewidths=0, rasterized=not few)
            )
    axes.set_ylim(recording.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(recording.num_ranks), [f"rank {rank}" for rank in range(recording.num_ranks)])
    axes.tick_params(axis="y", length=0, labelsize=8 if recording.num_ranks <= 24 else 6)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _boxes(spans: np.ndarray, bottoms: np.ndarray, height: float) -> Any:
    """The corners of boxes: an array [boxes, 4, 2], which PolyCollection takes although its annotation does not."""
    left, right = spans[:, 0], spans[:, 1]
    across = np.stack([left, left, right, right], axis=1)
    down = np.stack([bottoms, bottoms + height, bottoms + height, bottoms], axis=1)
    return np.stack([across, down], axis=2)


def _mark_colour(colour: str) -> tuple[float, ...]:
    """The colour moved towards black if it is light, towards white if it is dark."""
    target = 0.0 if _luminance(colour) > 0.5 else 1.0
    return tuple(0.45 * part + 0.55 * target for part in to_rgb(colour))


def _luminance(colour: str) -> float:
    red, green, blue = to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _label_bars(axes: Axes, recording: Recording, length: float) -> None:
    """Write microbatch and chunk into every bar that has room for them."""
    first = min(event.start for event in recording.events)
    for event in recording.events[: _MOST_PATHS if len(recording.events) <= _MOST_PATHS else 0]:
        kind, _, unit = event.action
        text = f"{microbatch_letters(unit.microbatch)}{unit.chunk}"
        inches = float(event.end - event.start) / length * _DRAWN_WIDTH
        if inches > 0.06 * len(text):
            middle = float(event.start + event.end) / 2 - float(first)
            colour = "black" if _luminance(COLOURS[kind]) > 0.5 else "white"
            axes.text(middle, event.rank, text, color=colour, fontsize=6, ha="center", va="center", clip_on=True)


def _draw_memory(axes: Axes, recording: Recording) -> None:
    num_ranks = recording.num_ranks
    sizes = UnitSizes.one_each(recording.num_stages, recording.num_chunks)
    colours = matplotlib.colormaps["cividis"](np.linspace(0, 0.8, num_ranks))
    highest = 0.0
    lines = []
    for curve in memory_over_time(recording.events, num_ranks, sizes):
        # Of several changes at one time the last holds.
        points = np.array([(0.0, 0.0), *dict(curve).items()], dtype=float)
        highest = max(highest, points[:, 1].max())
        # A step: every level lasts until the time of the next.
        times = np.repeat(points[:, 0], 2)[1:]
        levels = np.repeat(points[:, 1], 2)[:-1]
        lines.append(np.column_stack([times, levels]))
    few = len(recording.events) <= _MOST_PATHS
    widths = np.linspace(*_LINE_WIDTHS, num_ranks)
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=widths, rasterized=not few))
    axes.set_ylim(0, highest * 1.12)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylabel("units held")
    whole = recording.virtual_stages * recording.num_chunks
    axes.axhline(whole, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    # Beside the axes, where no line passes.
    axes.annotate(
        f"one micro-\nbatch ({whole})",
        (1, whole),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        fontsize=7,
        va="center",
        annotation_clip=False,
    )
    axes.spines[["top", "right"]].set_visible(False)
    named = range(num_ranks) if num_ranks <= _MOST_LINES_NAMED else (0, num_ranks // 2, num_ranks - 1)
    handles = [Line2D([], [], color=colours[rank], linewidth=widths[rank], label=f"rank {rank}") for rank in named]
    # Above the axes for the same reason.
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(handles),
        frameon=False,
        fontsize=7,
        borderaxespad=0,
    )


def _handles(recordings: Sequence[Recording]) -> list[Patch]:
    kinds = {event.action.kind for recording in recordings for event in recording.events}
    handles = [Patch(facecolor=COLOURS[kind], label=_MEANINGS[kind]) for kind in Kind if kind in kinds]
    if any(recording.virtual_stages > 1 for recording in recordings):
        handles.append(Patch(facecolor="none", label="mark: the rank's stage, 0 at the bottom"))
    handles.append(Patch(facecolor="none", label="a0: microbatch a, chunk 0"))
    return handles
