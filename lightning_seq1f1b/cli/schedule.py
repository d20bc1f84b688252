"""`lightning-seq1f1b schedule`: draw, simulate or verify a schedule, without torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import isfinite
from typing import Any

from jsonargparse import ArgumentError, Namespace

from lightning_seq1f1b.cli import schedule_result
from lightning_seq1f1b.cli.schedule_files import FILE_OPTIONS, write_files
from lightning_seq1f1b.cli.schedule_options import SIZES, TIMES, in_terms_of_options, option, parser
from lightning_seq1f1b.cli.schedule_result import Result
from lightning_seq1f1b.schedule.measured_times import measured_times
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.simulate import Costs, simulate
from lightning_seq1f1b.schedule.ticks import in_ticks
from lightning_seq1f1b.schedule.timeline import Time
from lightning_seq1f1b.schedule.timeline_file import Recording, load, one_or_each
from lightning_seq1f1b.schedule.unit_times import StepTimes

_MOST_UNITS = 1_000_000
"""Checking so many takes about a minute; real plans are far smaller."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments after `schedule`; those of the process when None.

    Returns:
        The process's exit status: 0, or 2 for bad input, which one sentence on stderr explains.
    """
    try:
        arguments = parser().parse_args(sys.argv[1:] if argv is None else list(argv))
        verb = arguments.verb
        asked = arguments[verb]
        result = _result(asked)
        files = write_files(result, {name: asked.get(name) for name in FILE_OPTIONS})
        print(json.dumps(_AS_JSON[verb](result)) if asked.json else _as_text(verb, result, files))
    except OverflowError:
        print("error: the times are too large to add up; give them in a larger unit", file=sys.stderr)
        return 2
    except (ArgumentError, ValueError) as error:
        print(f"error: {in_terms_of_options(str(error))}", file=sys.stderr)
        return 2
    return 0


def _as_text(verb: str, result: Result, files: Sequence[str]) -> str:
    if not files:
        return _AS_TEXT[verb](result)
    title, numbers = schedule_result.title(result.plan), schedule_result.summary(result)
    return f"{title}\n{numbers}\nwritten     {', '.join(files)}"


def _result(asked: Namespace) -> Result:
    measured = load(asked.measured) if asked.get("measured") else None
    schedule = (measured.schedule if measured else "seq1f1b") if asked.schedule is None else asked.schedule
    if schedule is None:
        raise ValueError(f"the timeline {asked.measured!r} does not name its schedule; set --schedule")
    sizes = {name: number if asked[name] is None else asked[name] for name, number in _sizes(measured).items()}
    chunks = sizes["chunks"] = _chunks(sizes["chunks"])
    if isinstance(chunks, tuple) and asked.microbatches is None:
        sizes["microbatches"] = len(chunks)
    _check_sizes(sizes)
    if measured and measured.num_ranks != sizes["stages"]:
        raise ValueError(f"--stages must be {measured.num_ranks}, as in {asked.measured!r}, not {sizes['stages']}")
    _check_times(asked)
    if asked.activation_cap is not None and schedule in POLICIES and not POLICIES[schedule].trains:
        raise ValueError(
            f"--activation-cap has no effect on schedule {schedule!r}, which holds one unit at a time; leave it out"
        )
    links = _exact(asked.links)
    if measured and all(asked[name] is None for name in (*TIMES, "chunk_weights")):
        costs = None
        times: StepTimes = _times_of(measured, sizes, schedule)
    else:
        costs = _costs(asked, sizes, needs_all=measured is not None)
        times = costs.unit_times(sizes["stages"] * sizes["virtual_stages"])
    times, latency, ticks = in_ticks(times, links)
    knob, cap = asked.memory_knob, asked.activation_cap
    repeats = measured is not None and measured.schedule == schedule and _sizes(measured) == sizes
    if measured and repeats and knob is None and cap is None:
        knob, cap = _knob_of(measured), measured.activation_cap
    plan = make_plan(
        schedule,
        sizes["stages"],
        sizes["microbatches"],
        sizes["chunks"],
        virtual_stages=sizes["virtual_stages"],
        memory_knob=knob,
        activation_cap=cap,
        # A step runs a plan that was made without its times, and weight gradients as soon as a rank would wait.
        times=None if repeats else times,
    )
    return Result(
        plan=plan,
        memory_knob=knob or POLICIES[schedule].memory_knob,
        times=(costs.forward, costs.input_grad, costs.weight_grad) if costs else None,
        links=links,
        simulation=simulate(plan, times, latency, early_weight_grads=repeats),
        ticks=ticks,
        measured=measured,
    )


def _chunks(asked: str | int | tuple[int, ...]) -> int | tuple[int, ...]:
    """The chunks of every microbatch, or of each."""
    if not isinstance(asked, str):
        return asked
    try:
        chunks = tuple(map(int, asked.split(",")))
    except ValueError as error:
        raise ValueError(
            f"--chunks is a whole number, or with commas one for each microbatch, such as 8,3,1, not {asked!r}"
        ) from error
    return chunks if "," in asked else chunks[0]


def _sizes(measured: Recording | None) -> dict[str, Any]:
    """What the sizes are where they are not given."""
    if measured is None:
        return {name: default for name, (_, default, _) in SIZES.items()}
    return {
        "stages": measured.num_ranks,
        "microbatches": measured.num_microbatches,
        "chunks": one_or_each(measured.chunks),
        "virtual_stages": measured.virtual_stages,
    }


def _check_times(asked: Namespace) -> None:
    for name in (*TIMES, "links"):
        time = asked[name]
        if time is not None and not (isfinite(time) and time >= 0):
            raise ValueError(f"{option(name)} is a time and must be finite and not negative; it is {time:g}")


def _check_sizes(sizes: dict[str, Any]) -> None:
    chunks, others = sizes["chunks"], {name: number for name, number in sizes.items() if name != "chunks"}
    listed = (chunks,) * others["microbatches"] if isinstance(chunks, int) else chunks
    for name, number in {**others, "chunks": min(listed, default=chunks)}.items():
        if number < 1:
            raise ValueError(f"{option(name)} must be at least 1, not {number}")
    units = others["stages"] * others["virtual_stages"] * sum(listed)
    if units > _MOST_UNITS:
        raise ValueError(
            f"stages x virtual stages x microbatches x chunks is {units}; at most {_MOST_UNITS} are drawn or checked"
        )


def _knob_of(measured: Recording) -> int | None:
    """The memory knob; None for schedules without one, such as that of an evaluation by a strategy that has it set."""
    policy = POLICIES.get(measured.schedule or "")
    return None if policy is None or policy.memory_knob is None else measured.memory_knob


def _times_of(measured: Recording, sizes: dict[str, Any], schedule: str) -> StepTimes:
    num_stages = sizes["stages"] * sizes["virtual_stages"]
    splits = schedule in POLICIES and POLICIES[schedule].splits_backward
    try:
        return measured_times(measured, num_stages, sizes["chunks"], splits_backward=splits)
    except ValueError as error:
        unit = f" in {measured.time_unit}" if measured.time_unit else ""
        raise ValueError(f"{error}; set {', '.join(map(option, TIMES))}{unit}") from error


def _costs(asked: Namespace, sizes: dict[str, Any], *, needs_all: bool) -> Costs:
    most = sizes["chunks"] if isinstance(sizes["chunks"], int) else max(sizes["chunks"])
    missing = [option(name) for name in TIMES if asked[name] is None]
    if needs_all and missing:
        raise ValueError(f"set {', '.join(missing)} too, or none of the times, so that the measured ones are taken")
    return Costs(
        **{name: _exact(1.0 if asked[name] is None else asked[name]) for name in TIMES},
        num_chunks=most,
        chunk_weights=_weights(asked.chunk_weights, most),
        virtual_stages=sizes["virtual_stages"],
    )


def _weights(text: str | None, num_chunks: int) -> tuple[Time, ...] | None:
    if text is None:
        return None
    try:
        weights = tuple(Fraction(part) for part in text.split(","))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"--chunk-weights is numbers with commas between them, such as 4,3,2, not {text!r}") from error
    if len(weights) != num_chunks or min(weights) <= 0:
        raise ValueError(f"--chunk-weights must be {num_chunks} positive numbers, not {text}")
    return weights


def _exact(number: float) -> Fraction | float:
    """The decimal number that was typed, so that results such as a bubble of 0.3 are not off by a rounding error."""
    try:
        return Fraction(str(number))
    except ValueError:
        return number


_AS_TEXT: dict[str, Callable[[Result], str]] = {
    "draw": schedule_result.drawn,
    "simulate": schedule_result.simulated,
    "verify": schedule_result.verified,
}
_AS_JSON: dict[str, Callable[[Result], dict[str, Any]]] = {
    "draw": schedule_result.drawn_numbers,
    "simulate": schedule_result.numbers,
    "verify": schedule_result.verified_numbers,
}
