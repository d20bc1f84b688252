"""`lightning-seq1f1b schedule`: draw, simulate or verify a schedule, without torch."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from lightning_seq1f1b.schedule.draw import LEGEND, draw
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.simulate import Costs, Simulation, simulate

VERBS = {
    "draw": "draw the plan over simulated time, one row for each rank",
    "simulate": "give the makespan, the bubble, and the work and peak memory of every rank",
    "verify": "check that the plan is complete, ordered, matched between ranks and free of deadlock",
}

_OPTIONS = {
    "num_stages": "--stages",
    "num_microbatches": "--microbatches",
    "num_chunks": "--chunks",
    "schedule=": "--schedule=",
}
"""How the options are called for the names in the messages of the schedule package."""

_WIDTH_OF_A_PIPE = 160

_MOST_UNITS = 1_000_000
"""Checking so many takes about a minute; real plans are far smaller."""


@dataclass(frozen=True)
class Result:
    """A verified plan, and how its step would go with the asked times."""

    plan: Plan
    costs: Costs
    simulation: Simulation


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments after `schedule`; those of the process when None.

    Returns:
        The process's exit status: 0, or 2 for bad input, which one sentence on stderr explains.
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
        verb = arguments.verb
        asked = arguments[verb]
        result = _result(asked)
        print(json.dumps(_AS_JSON[verb](result)) if asked.json else _AS_TEXT[verb](result))
    except (ArgumentError, ValueError, OverflowError) as error:
        print(f"error: {_in_terms_of_options(str(error))}", file=sys.stderr)
        return 2
    return 0


def _in_terms_of_options(message: str) -> str:
    for name, option in _OPTIONS.items():
        message = message.replace(name, option)
    return " ".join(message.split())


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lightning-seq1f1b schedule",
        description="Draw, simulate or verify the plan of a pipeline schedule. Needs neither a GPU nor torch.",
        exit_on_error=False,
    )
    verbs = parser.add_subcommands(dest="verb", metavar="{" + ",".join(VERBS) + "}")
    for verb, what in VERBS.items():
        options = ArgumentParser(description=f"{what[0].upper()}{what[1:]}.", exit_on_error=False)
        names = ", ".join(POLICIES)
        options.add_argument(
            "--schedule", type=str, default="seq1f1b", metavar="NAME", help=f"the order of the work: {names}"
        )
        for option, letter, default, what_counts in (
            ("--stages", "P", 4, "stages the model is cut into, one on each rank"),
            ("--microbatches", "M", 4, "microbatches of a step"),
            ("--chunks", "K", 4, "chunks that each microbatch is cut into; 1 for 1f1b"),
            ("--virtual-stages", "V", 1, "stages on each rank; 1 for all of these schedules"),
        ):
            options.add_argument(option, type=int, default=default, metavar=letter, help=what_counts)
        for option, letter, what_runs in (
            ("--forward", "F", "the forward"),
            ("--input-grad", "B", "the part of the backward that gives the gradient of the input,"),
            ("--weight-grad", "W", "the part of the backward that gives the gradients of the weights,"),
        ):
            explanation = f"time of {what_runs} of one whole microbatch on one rank's layers, in any unit"
            options.add_argument(option, type=float, default=1.0, metavar=letter, help=explanation)
        options.add_argument("--json", action="store_true", help="print one JSON object")
        verbs.add_subcommand(verb, options, help=what)
    return parser


def _result(asked: Namespace) -> Result:
    units = asked.stages * asked.microbatches * asked.chunks
    if units > _MOST_UNITS:
        raise ValueError(f"stages x microbatches x chunks is {units}; at most {_MOST_UNITS} are drawn or checked")
    plan = make_plan(asked.schedule, asked.stages, asked.microbatches, asked.chunks)
    if asked.virtual_stages != 1:
        raise ValueError(
            f"--virtual-stages must be 1, not {asked.virtual_stages}: "
            f"{', '.join(POLICIES)} place one stage on a rank; for more stages, set --stages"
        )
    costs = Costs(_exact(asked.forward), _exact(asked.input_grad), _exact(asked.weight_grad), plan.num_chunks)
    return Result(plan, costs, simulate(plan, costs))


def _exact(number: float) -> Fraction | float:
    """The decimal number that was typed, so that results such as a bubble of 0.3 are not off by a rounding error."""
    try:
        return Fraction(str(number))
    except ValueError:
        return number


def _numbers(result: Result) -> dict[str, Any]:
    plan, costs, simulation = result.plan, result.costs, result.simulation
    return {
        "schedule": plan.schedule,
        "stages": plan.num_stages,
        "microbatches": plan.num_microbatches,
        "chunks": plan.num_chunks,
        "virtual_stages": 1,
        "forward": float(costs.forward),
        "input_grad": float(costs.input_grad),
        "weight_grad": float(costs.weight_grad),
        "valid": True,
        "makespan": float(simulation.makespan),
        "bubble": float(simulation.bubble),
        "work": [float(work) for work in simulation.work],
        "peak_units": list(simulation.peak_units),
    }


def _drawn_numbers(result: Result) -> dict[str, Any]:
    timeline = [
        {"rank": event.rank, "action": str(event.action), "start": float(event.start), "end": float(event.end)}
        for event in result.simulation.timeline
    ]
    return {**_numbers(result), "timeline": timeline}


def _verified_numbers(result: Result) -> dict[str, Any]:
    return {**_numbers(result), "actions": [len(row) for row in result.plan.actions]}


def _title(plan: Plan) -> str:
    counts = ((plan.num_stages, "stage"), (plan.num_microbatches, "microbatch"), (plan.num_chunks, "chunk"))
    plurals = {"stage": "stages", "microbatch": "microbatches", "chunk": "chunks"}
    return f"{plan.schedule}: " + ", ".join(
        f"{count} {word if count == 1 else plurals[word]}" for count, word in counts
    )


def _summary(result: Result) -> str:
    simulation = result.simulation
    share = float(simulation.bubble / simulation.makespan) if simulation.makespan else 0.0
    return "\n".join(
        (
            f"makespan    {float(simulation.makespan):g}",
            f"bubble      {float(simulation.bubble):g} ({share:.1%} of the makespan)",
            f"peak units  {' '.join(map(str, simulation.peak_units))} (rank 0 first)",
        )
    )


def _drawn(result: Result) -> str:
    width = shutil.get_terminal_size((_WIDTH_OF_A_PIPE, 24)).columns
    picture = draw(result.simulation.timeline, result.plan.num_stages, width)
    return f"{_title(result.plan)}\n\n{picture}\n\n{LEGEND}\n\n{_summary(result)}"


def _simulated(result: Result) -> str:
    work = " ".join(f"{float(work):g}" for work in result.simulation.work)
    return f"{_title(result.plan)}\n{_summary(result)}\nwork        {work}"


def _verified(result: Result) -> str:
    actions = sum(map(len, result.plan.actions))
    return f"{_title(result.plan)}: valid, {actions} actions on {len(result.plan.actions)} ranks"


_AS_TEXT: dict[str, Callable[[Result], str]] = {"draw": _drawn, "simulate": _simulated, "verify": _verified}
_AS_JSON: dict[str, Callable[[Result], dict[str, Any]]] = {
    "draw": _drawn_numbers,
    "simulate": _numbers,
    "verify": _verified_numbers,
}
