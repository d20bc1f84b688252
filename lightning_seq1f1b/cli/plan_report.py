"""What `lightning-seq1f1b plan` prints: tables for people, numbers for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_seq1f1b.schedule.planner.explanation import boundaries, explain, size
from lightning_seq1f1b.schedule.planner.prediction import Memory, Prediction
from lightning_seq1f1b.schedule.planner.search import EQUAL, Ranking

GIB = 2.0**30
WIDTH = 120


def lines(ranking: Ranking, top: int, asked: str) -> Iterator[str]:
    """The report, line by line, without the configuration.

    Args:
        ranking: what the search found.
        top: rows of the table.
        asked: what was planned, in words.
    """
    yield asked
    if ranking.problem.memory is not None:
        yield f"{size(ranking.problem.memory)} a rank are planned with; the rest is left to the driver and workspaces"
    yield ""
    yield from _table(
        ["", "schedule", "v", "k", "j", "chunks", "s/step", "idle", "tokens/s", "MFU", "peak GiB"],
        [_row(ranking, place, found) for place, found in enumerate(_shown(ranking, top), 1)],
        left=(1, 5),
    )
    yield ""
    yield "v: virtual stages of a rank, k: chunks of a row, j: memory knob, ~: seen on fewer microbatches"
    yield f"of the settings within {EQUAL:.1%} of the fastest the simplest comes first; the others are in order of time"
    if not ranking.complete:
        yield "the most promising settings were played; others may be close to these"
    yield ""
    for sentence in explain(ranking):
        yield from textwrap.wrap(f"- {sentence}", WIDTH, subsequent_indent="  ")
    yield ""
    yield "memory in GiB at the fullest moment of every rank, with the first setting"
    yield from _memory_table(ranking)


def numbers(ranking: Ranking) -> dict[str, Any]:
    """The report as what JSON can hold, with all settings that were played and fit; seconds and bytes."""
    problem = ranking.problem
    return {
        "num_ranks": problem.num_ranks,
        "num_microbatches": problem.num_microbatches,
        "rows_per_microbatch": problem.training.rows,
        "sequence_length": problem.length,
        "memory_limit": problem.memory,
        "considered": ranking.considered,
        "too_large": ranking.too_large,
        "complete": ranking.complete,
        "plans": [_numbers(ranking, found) for found in ranking.predictions],
        "memory": [{**rank._asdict(), "total": rank.total} for rank in ranking.best.memory or ()],
        "why": explain(ranking),
    }


def _numbers(ranking: Ranking, found: Prediction) -> dict[str, Any]:
    setting, problem = found.setting, ranking.problem
    return {
        "schedule": setting.schedule,
        "virtual_stages": setting.virtual_stages,
        "num_chunks": setting.num_chunks,
        "memory_knob": setting.memory_knob,
        "partition": setting.partition,
        "chunk_lengths": [span.length for span in setting.spans(problem)],
        "layers": setting.layers,
        "step_seconds": found.seconds,
        "bubble": found.waiting,
        "idle": found.idle,
        "tokens_per_second": found.tokens_per_second(problem),
        "mfu": found.utilisation(problem) or None,
        "peak_bytes": found.peaks,
        "exact": found.exact,
    }


def _shown(ranking: Ranking, top: int) -> list[Prediction]:
    """The first setting, then the best of every schedule, then of every schedule and number of stages, then others.

    Of settings that differ in their layers alone, the best.
    """
    chosen: dict[Prediction, None] = {ranking.best: None}
    columns = ("schedule", "virtual_stages", "num_chunks", "memory_knob", "partition")
    seen: set[tuple[object, ...]] = {tuple(getattr(ranking.best.setting, name) for name in columns)}
    for number in (1, 2, len(columns)):
        groups = {key[:number] for key in seen}
        for found in ranking.predictions:
            key = tuple(getattr(found.setting, name) for name in columns)
            if key[:number] not in groups and len(chosen) < top:
                groups.add(key[:number])
                seen.add(key)
                chosen[found] = None
    return [found for found in ranking.predictions if found in chosen]


def _row(ranking: Ranking, place: int, found: Prediction) -> list[str]:
    setting, problem = found.setting, ranking.problem
    return [
        str(place),
        setting.schedule,
        str(setting.virtual_stages),
        str(setting.num_chunks),
        "-" if setting.memory_knob is None else str(setting.memory_knob),
        boundaries(setting) if setting.num_chunks > 1 else "-",
        f"{'' if found.exact else '~'}{found.seconds:.4g}",
        f"{found.idle:.1%}",
        f"{found.tokens_per_second(problem):,.0f}",
        f"{mfu:.1%}" if (mfu := found.utilisation(problem)) else "-",
        f"{found.peak / GIB:.2f}",
    ]


def _memory_table(ranking: Ranking) -> Iterator[str]:
    layers, ranks = ranking.best.setting.layers, ranking.problem.num_ranks
    parts = [name.replace("keys_values", "keys, values") for name in Memory._fields]
    rows = [
        [str(rank), "+".join(map(str, layers[rank::ranks])), *(f"{part / GIB:.2f}" for part in (*held, held.total))]
        for rank, held in enumerate(ranking.best.memory or ())
    ]
    yield from _table(["rank", "layers", *parts, "total"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
