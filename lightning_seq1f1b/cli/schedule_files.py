"""The files that `lightning-seq1f1b schedule draw` writes: figures, traces, CSV and timelines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_seq1f1b.cli.schedule_result import Result
from lightning_seq1f1b.schedule.chrome_trace import chrome_trace
from lightning_seq1f1b.schedule.timeline_file import save
from lightning_seq1f1b.schedule.torch_csv import torch_csv


@dataclass(frozen=True)
class FileOption:
    """An option that takes the name of a file to write."""

    help: str
    write: Callable[[str, Result], None]
    suffix: str | None = None


def write_files(result: Result, asked: dict[str, str | None]) -> list[str]:
    """Write what was asked for.

    Args:
        result: what to write.
        asked: the file by the name of its option in `FILE_OPTIONS`; None where it was not given.

    Returns:
        The files.

    Raises:
        ValueError: if a file cannot be written, its name is "-", or its suffix contradicts its option.
    """
    written = []
    for name, path in asked.items():
        if path is None:
            continue
        option, given = FILE_OPTIONS[name], f"--{name.replace('_', '-')}"
        if path == "-":
            raise ValueError(f"{given} takes the name of a file, not '-'; /dev/stdout is one where the system has it")
        if option.suffix and Path(path).suffix.lower() != option.suffix:
            raise ValueError(f"{given} writes a file that ends with {option.suffix}, not {path!r}")
        try:
            option.write(path, result)
        except OSError as error:
            raise ValueError(f"{path!r} cannot be written: {error.strerror or error}") from error
        written.append(path)
    return written


def _write_figure(path: str, result: Result) -> None:
    try:
        from lightning_seq1f1b.cli.timeline_figure import save_figure
    except ImportError as error:
        raise ValueError(
            f"a figure needs matplotlib, which cannot be imported ({error}): pip install 'lightning-seq1f1b[pictures]'"
        ) from error
    save_figure(path, result.recordings)


def _write_trace(path: str, result: Result) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(chrome_trace(result.recordings), file)


def _write_timeline(path: str, result: Result) -> None:
    recording = result.simulated
    save(
        path,
        recording.events,
        schedule=recording.schedule,
        time_unit=recording.time_unit,
        memory_knob=recording.memory_knob,
        activation_cap=recording.activation_cap,
    )


def _write_compute(path: str, result: Result) -> None:
    Path(path).write_text(torch_csv(result.plan.compute), encoding="utf-8")


def _write_actions(path: str, result: Result) -> None:
    Path(path).write_text(torch_csv(result.plan.actions), encoding="utf-8")


FILE_OPTIONS = {
    "svg": FileOption("draw the timeline, and below it the memory over time, into an SVG file", _write_figure, ".svg"),
    "png": FileOption("the same as a PNG file", _write_figure, ".png"),
    "trace": FileOption("write trace events in JSON, for ui.perfetto.dev and chrome://tracing", _write_trace),
    "csv": FileOption(
        "write the plan in the CSV grammar of torch.distributed.pipelining (compute_only); needs --chunks=1",
        _write_compute,
    ),
    "csv_comms": FileOption("the same with sends and receives (compute_comms)", _write_actions),
    "timeline": FileOption("write the simulated timeline as JSON, which --measured reads", _write_timeline),
}
"""The options by name."""
