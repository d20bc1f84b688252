"""What `lightning-seq1f1b plan` says when it cannot plan, in terms of its options."""

from __future__ import annotations

import re
from dataclasses import replace

from lightning_seq1f1b.cli.planning import SPARE, lora_share
from lightning_seq1f1b.schedule.planner.evaluation import Evaluation
from lightning_seq1f1b.schedule.planner.explanation import size
from lightning_seq1f1b.schedule.planner.prediction import Prediction
from lightning_seq1f1b.schedule.planner.problem import Problem

OPTIONS = {
    "num_ranks": "--devices",
    "num_microbatches": "--microbatches",
    "num_chunks": "--chunks",
    "virtual_stages": "--virtual-stages",
    "memory_knob": "--memory-knob",
    "length": "--seq-len",
    "schedule": "--schedule",
    "partition": "--partition",
}
"""What the options are called for the names in the messages of the schedule package."""

_WORDS = ("length", "schedule", "partition")
"""Names that are words, too: they are options where something is said of their value."""

_GIVEN = re.compile(rf"\b({'|'.join(OPTIONS)})=('[^']*'|\([^)]*\)|[^\s,;)]+)")
_NAMED = re.compile(
    rf"(?<![\w-])({'|'.join(name for name in OPTIONS if name not in _WORDS)})\b"
    rf"|(?<![\w-])({'|'.join(_WORDS)})(?= (?:must|lists|is)\b)"
)

LORA = 16
"""Rank of the adapters that are suggested."""

SMALLER = 0.8
"""Share of the memory below which a remedy is worth its name."""


def in_terms_of_options(message: str) -> str:
    """A message with the command's options in place of the planner's names, on one line."""

    def given(found: re.Match[str]) -> str:
        return f"{OPTIONS[found[1]]} {found[2].strip('()').replace(', ', ',').strip(chr(39))}"

    message = _GIVEN.sub(given, message)
    message = _NAMED.sub(lambda found: OPTIONS[found[0]], message)
    return " ".join(message.split())


def remedies(smallest: Prediction, problem: Problem) -> str:
    """How much memory is enough, and which options make the smallest setting much smaller."""
    training = problem.training
    options = {}
    if not training.recompute:
        options["--recompute"] = replace(training, recompute=True)
    if training.trainable_share == 1:
        options[f"--lora {LORA}"] = replace(training, trainable_share=lora_share(problem.shape, LORA))
    if len(options) == 2:
        both = options[f"--lora {LORA}"]
        options[" ".join(options)] = replace(both, recompute=True)
    said = []
    for option, changed in options.items():
        found = Evaluation(replace(problem, training=changed)).play(smallest.setting)
        if found is not None and found.peak < SMALLER * smallest.peak:
            said.append(f"with {option} the same setting needs {size(found.peak)}")
    return "; ".join([f"it fits with --memory {-(-smallest.peak / (1 - SPARE) // 2**20):.0f}MiB", *said])
