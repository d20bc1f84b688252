"""`lightning-seq1f1b`: one command for training, schedules and export. Each part is imported when it is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from lightning_seq1f1b import __version__

COMMANDS = {
    "fit": "train a model; --config FILE reads a YAML file, --print_config shows one",
    "validate": "loss and perplexity on the validation documents",
    "test": "loss and perplexity on the test documents",
    "predict": "loss and perplexity of every batch of the documents",
    "plan": "find the fastest schedule, stages and chunks for a model and the memory of the devices, without a GPU",
    "profile": "measure a model's layers on this machine, for plan --profile",
    "schedule": "draw, simulate or verify a pipeline schedule, without torch",
    "export": "turn a checkpoint into a directory that transformers' from_pretrained loads",
    "consolidate": "turn a sharded checkpoint, a directory, into one file",
    "doctor": "say what is installed and built, and which attention kernel is used; --json",
}
TRAINING = ("fit", "validate", "test", "predict")
_READER_GONE = 141
"""The status of a Unix tool that SIGPIPE ends: 128 + 13."""
USAGE = f"usage: lightning-seq1f1b [-h] [--version] {{{','.join(COMMANDS)}}} ..."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments after the program's name; those of the process when None, which running on several
            devices needs: the other processes are started with the same command line.

    Returns:
        The process's exit status: 0, 2 for a command line that is not understood, or 141 where nobody reads the output
        any more, as in `lightning-seq1f1b schedule draw | head -1`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in TRAINING:  # processes that lose each other break pipes, too: that error has to be seen
        from lightning_seq1f1b.cli import training

        training.run(None if argv is None else arguments)
        return 0
    try:
        try:
            return _run(command, rest)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE


def _run(command: str, rest: Sequence[str]) -> int:
    if command in ("-h", "--help"):
        print(_help())
    elif command == "--version":
        print(f"lightning-seq1f1b {__version__}")
    elif command == "schedule":
        from lightning_seq1f1b.cli import schedule

        return schedule.main(rest)
    elif command == "plan":
        from lightning_seq1f1b.cli import plan

        return plan.main(rest)
    elif command == "profile":
        from lightning_seq1f1b.cli import profile

        return profile.main(rest)
    elif command == "export":
        from lightning_seq1f1b.cli import export

        return export.main(rest)
    elif command == "consolidate":
        from lightning_seq1f1b.cli import consolidate

        return consolidate.main(rest)
    elif command == "doctor":
        from lightning_seq1f1b.cli import doctor

        return doctor.main(rest)
    else:
        print(f"{USAGE}\n{_complaint(command)}", file=sys.stderr)
        return 2
    return 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in COMMANDS.items())
    return (
        f"{USAGE}\n\nPipeline parallel fine-tuning of language models on long sequences, with PyTorch Lightning.\n\n"
        f"commands:\n{commands}\n\nlightning-seq1f1b COMMAND --help describes a command."
    )


def _complaint(command: str) -> str:
    if not command:
        return "error: a command is missing; --help lists them"
    nearest = get_close_matches(command, COMMANDS, n=1)
    hint = f"did you mean '{nearest[0]}'?" if nearest else "--help lists them"
    return f"error: unknown command '{command}'; {hint}"
