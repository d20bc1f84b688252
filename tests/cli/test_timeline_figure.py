"""Figures: what stands in them, read from the file, and colours that survive a bad printer and a bad eye."""

import re
import struct
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex, to_rgb

from lightning_seq1f1b.cli.timeline_figure import COLOURS, figure, save_figure
from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import Costs, simulate
from lightning_seq1f1b.schedule.timeline import Event
from lightning_seq1f1b.schedule.timeline_file import Recording


def recorded(schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int, virtual_stages: int) -> Recording:
    plan = make_plan(schedule, num_ranks, num_microbatches, num_chunks, virtual_stages=virtual_stages)
    one = Fraction(1)
    costs = Costs(one, one, one, num_chunks, virtual_stages=virtual_stages)
    return Recording(simulate(plan, costs).timeline, schedule, None)


FLAGSHIP = recorded("interleaved_seq1f1b_zb", 2, 2, 3, 2)
MEASURED = Recording(
    (
        Event(0, Action.parse("0F0.0"), 50.0, 51.0),
        Event(1, Action.parse("1F0.0"), 51.0, 53.0),
        Event(1, Action.parse("1B0.0"), 53.0, 56.0),
        Event(0, Action.parse("0B0.0"), 56.0, 58.0),
    ),
    "seq1f1b",
    "s",
)


def texts_of(path: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ElementTree.parse(path).iter() if element.tag.endswith("}text")]


def boxes(collection: PolyCollection) -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of every bar."""
    corners = [path.vertices for path in collection.get_paths()]
    return [(each[:, 0].min(), each[:, 0].max(), each[:, 1].min(), each[:, 1].max()) for each in corners]


def test_the_svg_names_ranks_units_kinds_and_numbers(tmp_path: Path) -> None:
    save_figure(tmp_path / "step.svg", {"simulated": FLAGSHIP})
    texts = texts_of(tmp_path / "step.svg")
    assert texts.count("rank 0") == 2  # beside the bars, and in the legend of the memory
    assert texts.count("b2") == 2 * 2 * 3  # on each rank and each of its stages: F, I and W
    assert {"F: forward", "I: input gradient", "W: weight gradients", "units held", "time"} <= set(texts)
    assert "B: backward" not in texts
    assert any("interleaved_seq1f1b_zb, p = 2, v = 2, m = 2, k = 3" in text for text in texts)


def test_the_same_timeline_gives_the_same_svg(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        save_figure(tmp_path / name, {"simulated": FLAGSHIP})
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_the_png_is_one(tmp_path: Path) -> None:
    save_figure(tmp_path / "step.png", {"simulated": FLAGSHIP})
    content = (tmp_path / "step.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">I", content[16:20])[0] == 14 * 150


def test_bars_are_the_events_in_the_colour_of_their_kind() -> None:
    work = figure({"measured": MEASURED}).axes[0]
    drawn = {
        (to_hex(collection.get_facecolor()[0]), round(left, 6), round(right, 6), round((top + bottom) / 2, 6))
        for collection in work.collections
        for left, right, top, bottom in boxes(collection)
    }
    forward, backward = COLOURS[Kind.F].lower(), COLOURS[Kind.B].lower()
    assert drawn == {(forward, 0, 1, 0), (forward, 1, 3, 1), (backward, 3, 6, 1), (backward, 6, 8, 0)}


def test_a_mark_in_each_bar_shows_the_stage_of_its_rank() -> None:
    events = [Event(0, Action.parse(f"{stage}F0.0"), stage, stage + 1) for stage in range(4)]
    bars, marks = figure({"": Recording(tuple(events))}).axes[0].collections
    assert len(boxes(bars)) == len(boxes(marks)) == 4
    heights = [top for _, _, top, _ in boxes(marks)]
    assert heights == sorted(heights, reverse=True)  # the axis points down: later stages stand higher
    for (_, _, top, bottom), (_, _, mark_top, mark_bottom) in zip(boxes(bars), boxes(marks), strict=True):
        assert top - 1e-9 <= mark_top < mark_bottom <= bottom + 1e-9


def test_the_memory_below_is_the_count_of_held_units() -> None:
    memory = figure({"simulated": recorded("seq1f1b", 3, 3, 4, 1)}).axes[1]
    (lines,) = (each for each in memory.collections if isinstance(each, LineCollection))
    assert [segment[:, 1].max() for segment in lines.get_segments()] == [6, 5, 4]  # k + p - r - 1
    assert [segment[-1, 1] for segment in lines.get_segments()] == [0, 0, 0]


def test_lines_that_coincide_are_all_seen() -> None:
    memory = figure({"simulated": recorded("interleaved_seq1f1b_zb", 8, 2, 8, 2)}).axes[1]
    (lines,) = (each for each in memory.collections if isinstance(each, LineCollection))
    peaks = [segment[:, 1].max() for segment in lines.get_segments()]
    widths = list(lines.get_linewidths())
    assert len(set(peaks)) == 1  # they do coincide
    assert all(below > above for below, above in pairwise(widths))
    assert [handle.get_linewidth() for handle in memory.get_legend().get_lines()] == widths


def test_no_line_passes_through_the_words_of_the_memory() -> None:
    drawn = figure({"simulated": recorded("interleaved_seq1f1b_zb", 16, 2, 4, 2)})
    drawn.draw_without_rendering()
    memory = drawn.axes[1]
    (level,) = memory.texts
    assert level.get_text() == "one micro-\nbatch (8)"
    assert memory.bbox.x1 <= level.get_window_extent().x0 < level.get_window_extent().x1 <= drawn.bbox.x1
    assert memory.get_legend().get_window_extent().y0 >= memory.bbox.y1


def test_the_title_tells_the_settings() -> None:
    described = replace(FLAGSHIP, memory_knob=2, activation_cap=9)
    assert "k = 3, j = 2, cap 9; makespan" in figure({"simulated": described}).axes[0].get_title(loc="left")


def test_two_timelines_share_an_axis_that_starts_at_zero() -> None:
    drawn = figure({"measured": MEASURED, "simulated": recorded("seq1f1b", 2, 1, 1, 1)})
    assert len(drawn.axes) == 4
    assert {axes.get_xlim() for axes in drawn.axes} == {(0, 8)}
    assert [axes.get_title(loc="left").split(":")[0] for axes in drawn.axes] == ["measured", "", "simulated", ""]
    assert "makespan 8 s, bubble 62.5%" in drawn.axes[0].get_title(loc="left")
    assert drawn.axes[-1].get_xlabel() == "time (s)"


def test_many_ranks_keep_their_labels_and_a_manageable_file(tmp_path: Path) -> None:
    recording = recorded("seq1f1b", 64, 8, 40, 1)
    assert len(recording.events) > 20_000
    drawn = figure({"simulated": recording})
    labels = drawn.axes[0].get_yticklabels()
    inches = drawn.get_size_inches()[1] / 64
    assert [label.get_text() for label in labels] == [f"rank {rank}" for rank in range(64)]
    assert all(label.get_fontsize() / 72 < inches for label in labels)
    save_figure(tmp_path / "step.svg", {"simulated": recording})
    assert (tmp_path / "step.svg").stat().st_size < 5e6


def luminance(rgb: tuple[float, ...]) -> float:
    return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]


# Linear RGB as a dichromat sees it: Viénot, Brettel and Mollon, 1999.
DICHROMACY = {
    "protanopia": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
    "deuteranopia": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
}


@pytest.mark.parametrize("eye", ["greyscale", *DICHROMACY])
def test_colours_of_kinds_stay_apart(eye: str) -> None:
    def seen(colour: str) -> tuple[float, ...]:
        rgb = to_rgb(colour)
        if eye == "greyscale":
            return (luminance(rgb),) * 3
        linear = [part**2.2 for part in rgb]
        mixed = (sum(weight * part for weight, part in zip(row, linear, strict=True)) for row in DICHROMACY[eye])
        return tuple(max(part, 0) ** (1 / 2.2) for part in mixed)

    for one, other in combinations(COLOURS.values(), 2):
        assert max(abs(first - second) for first, second in zip(seen(one), seen(other), strict=True)) > 0.15


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        figure({"": Recording((Event(0, Action.parse("0F0.0"), 1.0, 1.0),))})


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.compile("tiny.*not supported", re.DOTALL)):
        save_figure(tmp_path / "step.tiny", {"simulated": FLAGSHIP})
