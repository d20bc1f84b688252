"""`lightning-seq1f1b plan`: which schedule, stages and chunks are fastest in a given memory, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_seq1f1b.cli.plan_config import as_yaml, configuration
from lightning_seq1f1b.cli.plan_report import lines, numbers
from lightning_seq1f1b.cli.plan_wording import in_terms_of_options, remedies
from lightning_seq1f1b.cli.planning import PRECISIONS, SPARE, machine_of, precision_of, problem_of
from lightning_seq1f1b.cli.progress import Progress
from lightning_seq1f1b.schedule.estimate import MACHINES
from lightning_seq1f1b.schedule.planner.explanation import does_not_fit
from lightning_seq1f1b.schedule.planner.problem import Problem
from lightning_seq1f1b.schedule.planner.search import DoesNotFitError, search


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the process's exit status."""
    asked = _parser().parse_args(argv)
    try:
        print(_answer(asked))
    except ValueError as error:
        print(f"error: {in_terms_of_options(str(error))}", file=sys.stderr)
        return 2
    return 0


def _answer(asked: argparse.Namespace) -> str:
    from lightning_seq1f1b.cli.model_config import read_config
    from lightning_seq1f1b.models.shape import model_shape

    counts = ("devices", "seq_len", "batch_size", "microbatches", "virtual_stages", "chunks", "memory_knob", "top")
    for option in counts:
        number = getattr(asked, option)
        if number is not None and number < 1:
            raise ValueError(f"--{option.replace('_', '-')} must be at least 1, not {number}")
    asked.batch_size = asked.batch_size or asked.microbatches or asked.devices
    problem = problem_of(asked, model_shape(read_config(asked.model)))
    try:
        ranking = search(problem, progress=Progress("settings looked at"))
    except DoesNotFitError as error:
        raise ValueError(f"{does_not_fit(error, problem)}; {remedies(error.smallest, problem)}") from error
    machine, precision = machine_of(asked, problem.profile), precision_of(asked, problem.profile)
    config = configuration(
        ranking.best.setting,
        problem,
        devices=asked.devices,
        machine=machine,
        precision=precision,
        model=asked.model,
        batch_size=asked.batch_size,
    )
    if asked.config_only:
        return as_yaml(config).rstrip()
    if asked.json:
        return json.dumps({**numbers(ranking), "config": config})
    report = lines(ranking, asked.top, _asked_in_words(asked, problem, precision))
    return "\n".join(
        (*report, "", "configuration for lightning-seq1f1b fit --config FILE", "", as_yaml(config))
    ).rstrip()


def _asked_in_words(asked: argparse.Namespace, problem: Problem, precision: str) -> str:
    profile = problem.profile
    preset = f"{machine_of(asked)} by its vendor's figures (not measured)"
    where = preset if profile is None else f"as measured on {profile.device}"
    return (
        f"{asked.model}: {problem.shape.num_layers} layers, {problem.num_microbatches * problem.training.rows} rows of "
        f"{problem.length} tokens in {problem.num_microbatches} microbatches, {problem.num_ranks} ranks, {where}, "
        f"{precision}"
    )


def _partition(text: str) -> float | tuple[int, ...]:
    names = {"even": 0.0, "balanced": 1.0}
    if text in names:
        return names[text]
    try:
        if "," in text:
            return tuple(map(int, text.split(",")))
        if 0 <= float(text) <= 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"write even, balanced, a number between 0 and 1, or lengths in tokens like 512,256,256, not {text!r}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-seq1f1b plan",
        description="Find the fastest schedule, virtual stages, chunks and layers for a model, its rows and the memory "
        "of the devices; print a ranking, why the first one wins, and the configuration to train with it. Needs no "
        "GPU and no weights. The optimizer is taken to be AdamW.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="PATH_OR_NAME", help="directory, config.json or hub name in the local cache")
    add("--seq-len", type=int, required=True, metavar="N", help="tokens of a row")
    add("--devices", type=int, required=True, metavar="N", help="devices, each of them a rank of the pipeline")
    add("--memory", metavar="SIZE", help=f"of a device, like 80GiB; {SPARE:.0%}% of it is left free; the machine's own")
    add("--batch-size", type=int, metavar="N", help="rows of a step; as many as microbatches, or devices, by default")
    add("--microbatches", type=int, metavar="M", help="microbatches of a step; one for each row by default")
    add(
        "--machine",
        metavar="NAME",
        help=f"what a device is: {', '.join(MACHINES)}; that of the profile, else h100. Their speeds are vendors' "
        "figures and what is usually reached of them, not measured: to compare schedules, not for seconds to rely on",
    )
    add("--precision", metavar="NAME", help=f"the Trainer's: {', '.join(PRECISIONS)}; bf16-true, on the CPU 32-true")
    add(
        "--profile", type=Path, metavar="FILE", help="times measured by lightning-seq1f1b profile, used for --machine's"
    )
    add("--recompute", action="store_true", help="layers are computed again in the backward (gradient checkpointing)")
    trained = parser.add_mutually_exclusive_group()
    trained.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank on every linear layer")
    trained.add_argument(
        "--trainable-share", type=float, default=1.0, metavar="X", help="share of the weights that is trained"
    )
    fixed = parser.add_argument_group("what is not to be chosen")
    fixed.add_argument("--schedule", metavar="NAME", help="name of the schedule")
    fixed.add_argument("--virtual-stages", type=int, metavar="V", help="stages on each rank")
    fixed.add_argument("--chunks", type=int, metavar="K", help="chunks of every row")
    fixed.add_argument("--memory-knob", type=int, metavar="J", help="warm-up forwards for each rank behind")
    fixed.add_argument(
        "--partition", type=_partition, metavar="WHERE", help="even, balanced, between 0 and 1, or lengths: 512,256,256"
    )
    add(
        "--top",
        type=int,
        default=10,
        metavar="N",
        help="rows of the table, 10 by default: the best of every schedule, then of its other settings",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object; its plans are all settings that were tried and fit, those that "
        "differ in layers alone, too",
    )
    output.add_argument("--config-only", action="store_true", help="print the configuration alone")
    return parser
