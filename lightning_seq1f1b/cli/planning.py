"""Turns the options of `lightning-seq1f1b plan` into a problem for the planner."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.estimate import MACHINES, Machine, Training
from lightning_seq1f1b.schedule.logits import ACCELERATOR_SLICE, CPU_SLICE
from lightning_seq1f1b.schedule.planner import Knobs, Problem
from lightning_seq1f1b.schedule.profile import Profile
from lightning_seq1f1b.schedule.suggest import unknown

SPARE = 0.06
"""Share of a device's memory that is not planned with: the driver, workspaces of kernels, fragmentation."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*(?:([KMGT])(i)?)?B?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Precision:
    """What a precision of Lightning means for time and memory, with AdamW as the optimizer.

    Attributes:
        dtype: what matrix products and attention compute in.
        activation_bytes: bytes of an element of the activations.
        weight_bytes: bytes of a weight, with the copy of it that autocast keeps for a step.
        gradient_bytes: bytes of a weight's gradient; a step sums it in float32 at least.
        optimizer_bytes: bytes of the optimizer's state for one weight.
        gpu_speed: speed of matrix products against bfloat16 on a GPU.
    """

    dtype: str
    activation_bytes: float
    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    gpu_speed: float = 1.0


PRECISIONS = {
    "bf16-true": Precision("bfloat16", 2, 2, 4, 4),
    "bf16-mixed": Precision("bfloat16", 2, 6, 4, 8),
    "16-true": Precision("float16", 2, 2, 4, 4),
    "16-mixed": Precision("float16", 2, 6, 4, 8),
    # Without TF32, which torch leaves off unless it is asked for, float32 does not run on the matrix units.
    "32-true": Precision("float32", 4, 4, 4, 8, gpu_speed=1 / 15),
    "64-true": Precision("float64", 8, 8, 8, 16, gpu_speed=1 / 15),
}
"""Precisions by Lightning's names."""

CHUNK_MULTIPLE = {"cpu": 16}
GPU_CHUNK_MULTIPLE = 128
"""Tokens that the strategy rounds chunk lengths to."""

SHORTEST_CHUNK = 4
"""Multiples of that in the shortest chunk that is considered."""


def bytes_of(text: str) -> float:
    """Bytes of a size such as "80GiB", "80GB" or "500000000".

    Raises:
        ValueError: when it is no size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"'{text}' is no size of memory; write it like 80GiB, 80GB or a number of bytes")
    power = "KMGT".index(match[2].upper()) + 1 if match[2] else 0
    return float(match[1]) * (1024 if match[3] else 1000) ** power


def problem_of(asked: Namespace, shape: ModelShape) -> Problem:
    """The problem that the options describe.

    Args:
        asked: the parsed options.
        shape: of the model.

    Raises:
        ValueError: for an option that makes no sense; for a profile that does not fit.
    """
    profile = _profile(asked.profile, shape)
    machine = machine_of(asked, profile)
    precision = PRECISIONS[precision_of(asked, profile)]
    if profile is not None and profile.dtype != precision.dtype:
        raise ValueError(
            f"the profile {asked.profile} was measured in {profile.dtype}, but --precision computes in "
            f"{precision.dtype}; make the two agree"
        )
    if not 0 <= asked.trainable_share <= 1:
        raise ValueError(f"--trainable-share must be between 0 and 1, not {asked.trainable_share:g}")
    microbatches = asked.microbatches or asked.batch_size
    if asked.batch_size % microbatches != 0:
        raise ValueError(
            f"--batch-size {asked.batch_size} does not divide into --microbatches {microbatches} of equal size, which "
            f"is what is planned; make --batch-size a multiple of --microbatches"
        )
    share = asked.trainable_share if asked.lora is None else lora_share(shape, asked.lora)
    return Problem(
        shape=shape,
        num_ranks=asked.devices,
        length=asked.seq_len,
        num_microbatches=microbatches,
        training=Training(
            rows=asked.batch_size // microbatches,
            activation_bytes=precision.activation_bytes,
            weight_bytes=precision.weight_bytes,
            gradient_bytes=precision.gradient_bytes,
            optimizer_bytes=precision.optimizer_bytes,
            trainable_share=share,
            recompute=asked.recompute,
            logits_slice=CPU_SLICE if machine == "cpu" else ACCELERATOR_SLICE,
        ),
        machine=_machine(machine, precision),
        profile=profile,
        memory=planned_memory(asked, machine),
        multiple=_multiple(machine),
        shortest_chunk=SHORTEST_CHUNK * _multiple(machine),
        knobs=Knobs(
            schedule=asked.schedule,
            virtual_stages=asked.virtual_stages,
            num_chunks=asked.chunks,
            memory_knob=asked.memory_knob,
            partition=asked.partition,
        ),
    )


def precision_of(asked: Namespace, profile: Profile | None = None) -> str:
    """Name of the precision: what was asked for, else what was profiled, else what the machine is good at."""
    if asked.precision is not None:
        if asked.precision not in PRECISIONS:
            raise ValueError(unknown("--precision", asked.precision, PRECISIONS))
        return str(asked.precision)
    if profile is not None:
        return next(name for name, meant in PRECISIONS.items() if meant.dtype == profile.dtype)
    return "32-true" if machine_of(asked) == "cpu" else "bf16-true"


def machine_of(asked: Namespace, profile: Profile | None = None) -> str:
    """Name of the machine: what was asked for, else where the profile was measured, else an H100."""
    if asked.machine is not None:
        if asked.machine not in MACHINES:
            raise ValueError(unknown("--machine", asked.machine, MACHINES))
        return str(asked.machine)
    where = "" if profile is None else profile.device.lower()
    return next((name for name in MACHINES if name in where), "h100")


def planned_memory(asked: Namespace, machine: str) -> float | None:
    """Bytes of a device that are planned with; None when its memory is not known."""
    whole = MACHINES[machine].memory if asked.memory is None else bytes_of(asked.memory)
    return None if whole is None else whole * (1 - SPARE)


def lora_share(shape: ModelShape, rank: int) -> float:
    """Trained share of the weights, with adapters of this rank on every linear layer of the decoder layers.

    An adapter of a layer from a to b has rank (a + b) weights; the layer has a b.
    """
    if rank < 1:
        raise ValueError(f"--lora is the rank of the adapters and must be at least 1, not {rank}")
    layers = [shape.layer(index) for index in range(shape.num_layers)]
    adapters = sum(rank * (layer.linear_inputs + layer.linear_outputs) for layer in layers)
    return min(1.0, adapters / sum(layer.parameters for layer in layers))


def _machine(name: str, precision: Precision) -> Machine:
    machine = MACHINES[name]
    if name == "cpu":
        # Nobody names a peak for the threads that a rank has.
        return replace(machine, peak_flops=inf)
    speed = precision.gpu_speed
    return replace(
        machine,
        flops=machine.flops * speed,
        attention_flops=machine.attention_flops * speed,
        peak_flops=machine.peak_flops * speed,
    )


def _multiple(machine: str) -> int:
    return CHUNK_MULTIPLE.get(machine, GPU_CHUNK_MULTIPLE)


def _profile(path: Path | None, shape: ModelShape) -> Profile | None:
    if path is None:
        return None
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"the profile {path} cannot be read: {reason}") from error
    try:
        profile = Profile.from_json(text, shape)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if profile.dtype not in {precision.dtype for precision in PRECISIONS.values()}:
        raise ValueError(f"{path} was measured in {profile.dtype}, which no supported precision computes in")
    return profile
