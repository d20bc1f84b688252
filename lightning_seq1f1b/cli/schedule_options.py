"""The options of `lightning-seq1f1b schedule`."""

from __future__ import annotations

import re
from argparse import RawDescriptionHelpFormatter

from jsonargparse import ArgumentParser

from lightning_seq1f1b.cli.schedule_files import FILE_OPTIONS
from lightning_seq1f1b.schedule.policies import POLICIES

VERBS = {
    "draw": "draw the plan over simulated time, one row for each rank",
    "simulate": "give the makespan, the bubble, and the work and peak memory of every rank",
    "verify": "check that the plan is complete, ordered, matched between ranks and free of deadlock",
}

_NAMES = {
    "num_stages": "--stages",
    "num_ranks": "--stages",
    "num_microbatches": "--microbatches",
    "num_chunks": "--chunks",
    "virtual_stages": "--virtual-stages",
    "memory_knob": "--memory-knob",
    "activation_cap": "--activation-cap",
    "schedule=": "--schedule=",
}
"""How the options are called for the names in the messages of the schedule package."""

_WRONG_TYPE = re.compile(r'Parser key "(\w+)": Expected a <class \'(int|float)\'>. Got value: (.*)')
_TYPES = {"int": "whole number", "float": "finite number"}

SIZES = {
    "stages": ("P", 4, "stages the model is cut into, one on each rank; with --virtual-stages, ranks"),
    "microbatches": ("M", 4, "microbatches of a step"),
    "chunks": (
        "K",
        4,
        "chunks that each microbatch is cut into, or with commas a number for each, such as 8,3,1; 1 for schedules of "
        "whole sequences",
    ),
    "virtual_stages": ("V", 1, "stages on each rank, placed in a loop, for the interleaved schedules"),
}
"""Letter, default, and what it counts."""

TIMES = {
    "forward": ("F", "the forward"),
    "input_grad": ("B", "the part of the backward that gives the gradient of the input,"),
    "weight_grad": ("W", "the part of the backward that gives the gradients of the weights,"),
}
"""Letter, and what takes the time."""


def option(name: str) -> str:
    """The option of a name: `--memory-knob` of `memory_knob`."""
    return f"--{name.replace('_', '-')}"


def in_terms_of_options(message: str) -> str:
    """A message of the schedule package in one line, with the names of options where it says those of arguments."""
    message = " ".join(message.split())
    wrong = _WRONG_TYPE.match(message)
    if wrong:
        name, kind, value = wrong.groups()
        return f"{option(name)} must be a {_TYPES[kind]}, not {value}"
    for name, given in _NAMES.items():
        message = re.sub(rf"(?<![-\w]){name}", given, message)
    return message


def parser() -> ArgumentParser:
    """The command's parser, with a subcommand for each of `VERBS`."""
    command = ArgumentParser(
        prog="lightning-seq1f1b schedule",
        description="Draw, simulate or verify the plan of a pipeline schedule. Needs neither a GPU nor torch.",
        formatter_class=RawDescriptionHelpFormatter,
        exit_on_error=False,
    )
    verbs = command.add_subcommands(dest="verb", metavar="{" + ",".join(VERBS) + "}")
    width = max(map(len, POLICIES))
    schedules = "\n".join(["schedules:", *(f"  {name:<{width}}  {each.summary}" for name, each in POLICIES.items())])
    for verb, what in VERBS.items():
        options = ArgumentParser(
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=schedules,
            formatter_class=RawDescriptionHelpFormatter,
            exit_on_error=False,
        )
        _add_plan(options)
        _add_times(options)
        if verb == "draw":
            _add_pictures(options)
        options.add_argument("--json", action="store_true", help="print one JSON object")
        verbs.add_subcommand(verb, options, help=what)
        options.prog = f"{command.prog} {verb}"
    return command


def _add_plan(options: ArgumentParser) -> None:
    explanation = "the order of the work, one of those below (default: seq1f1b)"
    options.add_argument("--schedule", type=str, metavar="NAME", help=explanation)
    for name, (letter, default, what_counts) in SIZES.items():
        explanation = f"{what_counts} (default: {default})"
        options.add_argument(option(name), type=str if name == "chunks" else int, metavar=letter, help=explanation)
    options.add_argument(
        "--memory-knob",
        type=int,
        metavar="J",
        help="extra warm-up forwards of a rank for each rank behind it: more memory, and with a split backward a "
        "smaller bubble (default: the schedule's own)",
    )
    options.add_argument(
        "--activation-cap",
        type=int,
        metavar="N",
        help="most units (chunks on one stage) whose activations a rank may hold (default: what the schedule takes)",
    )


def _add_times(options: ArgumentParser) -> None:
    for name, (letter, what_runs) in TIMES.items():
        explanation = (
            f"time of {what_runs} of one whole microbatch on one rank's layers, in any unit (default: 1); of the one "
            "that has most chunks, where they differ"
        )
        options.add_argument(option(name), type=float, metavar=letter, help=explanation)
    options.add_argument(
        "--chunk-weights",
        type=str,
        metavar="A,B,...",
        help="how the chunks share those times: a positive number for each (default: equally)",
    )
    options.add_argument(
        "--links",
        type=float,
        default=0.0,
        metavar="LATENCY",
        help="time of a transfer between ranks, in the same unit (default: 0)",
    )


def _add_pictures(options: ArgumentParser) -> None:
    options.add_argument(
        "--measured",
        type=str,
        metavar="FILE",
        help="draw the measured timeline of this file above the simulated one, on one time axis; schedule, sizes, "
        "memory knob, cap and times that are not given are taken from it",
    )
    for name, file in FILE_OPTIONS.items():
        options.add_argument(option(name), type=str, metavar="FILE", help=file.help)
