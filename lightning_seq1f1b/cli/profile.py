"""`lightning-seq1f1b profile`: measure a model's layers, embedding and head on this machine, for `plan --profile`."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_seq1f1b.cli.progress import Progress
from lightning_seq1f1b.schedule.costs import ModelShape, attended_pairs
from lightning_seq1f1b.schedule.planner.fitting import Sample, error, fit
from lightning_seq1f1b.schedule.profile import PASSES, Fit, Profile
from lightning_seq1f1b.schedule.suggest import unknown

if TYPE_CHECKING:
    import torch

    from lightning_seq1f1b.cli.measuring import Measurement

DTYPES = ("float32", "bfloat16", "float64")
NUM_STAGES = 3
SECONDS = 20.0
"""How long the measuring may take, without loading the libraries and making the weights."""


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the process's exit status."""
    asked = _parser().parse_args(argv)
    try:
        print("\n".join(_measured(asked)))
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _measured(asked: argparse.Namespace) -> Iterator[str]:
    import torch

    from lightning_seq1f1b.cli.measuring import Measuring, row_of
    from lightning_seq1f1b.cli.model_config import read_config
    from lightning_seq1f1b.cli.sample_model import sample_config, sample_model
    from lightning_seq1f1b.models.shape import model_shape

    if asked.rows < 1:
        raise ValueError(f"--rows must be at least 1, not {asked.rows}")
    if asked.chunks is not None and min(asked.chunks) < 1:
        raise ValueError(f"--chunks are lengths in tokens and must be at least 1, not {min(asked.chunks)}")
    if not asked.output.parent.is_dir():
        raise ValueError(f"--output: the directory {asked.output.parent} does not exist")
    device = _device(asked.device)
    dtype = asked.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise ValueError(unknown("--dtype", dtype, DTYPES))
    config = read_config(asked.model)
    shape = model_shape(config)
    sample, layer = sample_config(config)
    model = sample_model(sample, getattr(torch, dtype), device)
    measuring = Measuring(model, shape.vocab_size, asked.rows)
    sizes = asked.chunks or list(measuring.affordable(SECONDS / 4))
    measurement = measuring.shortest(row_of(sizes), SECONDS, Progress("rounds measured"))
    profile, errors = fitted(shape, layer, measurement, asked.rows, dtype, _name(device))
    asked.output.write_text(profile.to_json())
    yield (
        f"{asked.model}: chunks of {', '.join(map(str, sorted(set(sizes))))} tokens behind up to "
        f"{measurement.spans[-1].start}, {asked.rows} rows, {dtype}, {profile.device}; best of {measurement.rounds}"
    )
    yield "microseconds of s tokens that end at token P: a (s P - s^2 / 2) + b s + c"
    yield f"{'part':<10} {'pass':<12} {'a':>10} {'b':>10} {'c':>10}  mean error"
    for (part, name), mean in errors.items():
        one: Fit = getattr(profile, part)[name]
        numbers = " ".join(f"{1e6 * value:>10.4g}" for value in (one.pairs, one.tokens, one.constant))
        yield f"{part:<10} {name:<12} {numbers}  {mean:.1%}"
    yield f"written to {asked.output}; use it with lightning-seq1f1b plan --profile {asked.output}"


def fitted(
    shape: ModelShape, layer: int, measurement: Measurement, rows: int, dtype: str, device: str
) -> tuple[Profile, dict[tuple[str, str], float]]:
    """A profile from measured times, and the mean relative error of every fit.

    A layer's times are those of the stage that has nothing else. What the two other stages take more is fitted as
    embedding and head, with errors relative to the stage.

    Args:
        shape: of the whole model.
        layer: index of the layer in it that was measured.
        measurement: of `Measuring`.
        rows: of the microbatch.
        dtype: of the activations.
        device: in words.
    """
    fits: dict[str, dict[str, Fit]] = {"layer": {}, "embedding": {}, "head": {}}
    errors = {}
    window = shape.layer(layer).window
    for name in PASSES:
        taken = [
            [max(measurement.times[stage, name, chunk], 1e-9) for chunk in range(len(measurement.spans))]
            for stage in range(NUM_STAGES)
        ]
        sizes = [(attended_pairs(span.start, span.stop, window), span.length) for span in measurement.spans]
        for part, stage in (("layer", 1), ("embedding", 0), ("head", 2)):
            own = part == "layer"
            samples = [
                Sample(*size, whole if own else whole - alone, whole)
                for size, whole, alone in zip(sizes, taken[stage], taken[1], strict=True)
            ]
            fits[part][name] = fit(samples, attends=own)
            errors[part, name] = error(fits[part][name], samples)
    return Profile(shape, rows, dtype, device, **fits), errors


def _device(asked: str | None) -> torch.device:
    import torch

    if asked is None:
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    try:
        device = torch.device(asked)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {asked} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def _name(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} ({platform.machine()}, {threads} thread{'' if threads == 1 else 's'})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-seq1f1b profile",
        description="Time forward, input gradient and weight gradient of one layer, of the embedding and of the head "
        "of a model, for chunks of a few sizes, and fit what a chunk of any size takes. Takes less than a minute; "
        "needs no weights. On the CPU, set OMP_NUM_THREADS to what each rank of the training will have.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="PATH_OR_NAME", help="directory, config.json or hub name in the local cache")
    add("--output", type=Path, required=True, metavar="FILE", help="the profile to write, as JSON")
    add("--chunks", type=_lengths, metavar="N,N", help="chunk lengths to measure; what there is time for by default")
    add("--rows", type=int, default=1, metavar="N", help="rows of a microbatch; 1 by default")
    add("--dtype", metavar="NAME", help=f"{', '.join(DTYPES)}; bfloat16, on the CPU float32")
    add("--device", metavar="NAME", help="such as cpu or cuda:0; the accelerator by default where there is one")
    return parser


def _lengths(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"write lengths in tokens, like 256,512, not {text!r}") from error
