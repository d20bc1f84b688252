"""`schedule="auto"`: the planner shares out the layers once, and chooses the rest for every shape of batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_seq1f1b.runtime.pipeline import Cutting
from lightning_seq1f1b.runtime.row_groups import split_rows
from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.estimate import MACHINES, Machine, Training
from lightning_seq1f1b.schedule.logits import ACCELERATOR_SLICE, CPU_SLICE
from lightning_seq1f1b.schedule.planner import Knobs, Problem, choose
from lightning_seq1f1b.schedule.planner.explanation import does_not_fit, words
from lightning_seq1f1b.schedule.planner.search import DoesNotFitError
from lightning_seq1f1b.schedule.planner.settings import Setting
from lightning_seq1f1b.schedule.profile import Profile

AUTO = "auto"

PLANNED_LENGTH = 4096
"""Tokens of the rows for which stages are planned when the data module does not say: attention counts by then."""

SPARE = 0.06
"""Share of a device's memory that is not planned with: the driver, workspaces of kernels, fragmentation."""

SHORTEST_CHUNK = 4
"""Multiples that chunk lengths are rounded to, in the shortest chunk that is considered."""

_ADAM = 2
"""Values for each weight in the state of AdamW, which is taken to be the optimizer: it does not exist yet."""


@dataclass(frozen=True)
class AutomaticCutting(Cutting):
    """Decides for every shape of batch.

    Attributes:
        problem: the planner's, with layers shared out; its length and microbatches are not those of any batch.
    """

    problem: Problem | None = None

    @classmethod
    def of(
        cls, problem: Problem, virtual_stages: int, layers: tuple[int, ...], num_microbatches: int | None
    ) -> AutomaticCutting:
        """For a model that is cut into these stages."""
        knobs = replace(problem.knobs, virtual_stages=virtual_stages, layers=layers)
        listed = knobs.partition if isinstance(knobs.partition, tuple) else cls.partition
        return cls(
            num_microbatches=num_microbatches,
            partition=listed,
            multiple=problem.multiple,
            problem=replace(problem, knobs=knobs),
        )

    def for_batch(self, rows: int, length: int) -> Cutting:
        """How to cut batches of `rows` sequences of at most about `length` tokens, the same on every process.

        They are planned as if all were that long, so that memory suffices; shorter ones then have fewer chunks, of the
        size that was planned.
        """
        assert self.problem is not None
        listed = isinstance(self.problem.knobs.partition, tuple)
        microbatches = len(split_rows(rows, self.num_microbatches))
        problem = replace(
            self.problem,
            length=length if listed else _rounded_up(length),
            num_microbatches=microbatches,
            training=replace(self.problem.training, rows=-(-rows // microbatches)),
        )
        setting = best_setting(problem)
        return Cutting(
            schedule=setting.schedule,
            num_microbatches=self.num_microbatches,
            num_chunks=min(setting.num_chunks, length),
            counts_longest=True,
            partition=setting.partition,
            multiple=self.multiple,
            virtual_stages=setting.virtual_stages,
            memory_knob=setting.memory_knob,
        )


@lru_cache(maxsize=1024)
def best_setting(problem: Problem) -> Setting:
    """The planner's choice; where it finds that nothing fits, the smallest, since predictions err on the safe side.

    It is asked for every batch: what a problem's answer was is kept, and said, once.
    """
    try:
        choice = choose(problem)
    except DoesNotFitError as error:
        rank_zero_warn(f"Seq1F1B planner: {does_not_fit(error, problem)}; trying that one")
        return error.smallest.setting
    rank_zero_info(
        f"Seq1F1B planner: for {problem.num_microbatches} microbatches of {problem.training.rows} x "
        f"{problem.length} tokens {words(choice.prediction.setting)}; {choice.prediction.seconds:.3g} s a step, "
        f"{choice.prediction.idle:.1%} of it idle, are expected"
    )
    return choice.prediction.setting


def problem_for(
    model: nn.Module,
    shape: ModelShape,
    *,
    num_ranks: int,
    device: torch.device,
    precision: str,
    multiple: int,
    data: Any,
    profile: str | None,
    knobs: Knobs,
) -> Problem:
    """The planner's problem before any batch is known.

    Args:
        model: the language model, not yet cut.
        shape: its shape.
        num_ranks: pipeline ranks.
        device: of this process.
        precision: of the Trainer, by Lightning's name.
        multiple: tokens that chunk lengths are rounded to.
        data: the data module; its `sequence_length` and `batch_size` are planned for where it has them.
        profile: path of a file that `lightning-seq1f1b profile` wrote.
        knobs: what the user has fixed.

    Raises:
        ValueError: for a profile that cannot be read, or is of another model.
    """
    length, rows = getattr(data, "sequence_length", None), getattr(data, "batch_size", None)
    if not isinstance(length, int) and knobs.layers is None:
        rank_zero_info(
            f"Seq1F1B planner: stages are planned for rows of {PLANNED_LENGTH} tokens, because the data module has no "
            "sequence_length; give it that attribute, or set virtual_stages and layers, if the rows are much longer or "
            "shorter"
        )
    return Problem(
        shape=shape,
        num_ranks=num_ranks,
        length=length if isinstance(length, int) else PLANNED_LENGTH,
        num_microbatches=rows if isinstance(rows, int) else num_ranks,
        training=training_of(model, precision, device),
        machine=machine_of(device),
        profile=None if profile is None else _read(profile, shape),
        memory=_memory(device),
        multiple=multiple,
        shortest_chunk=SHORTEST_CHUNK * multiple,
        knobs=knobs,
    )


def knobs_of(
    virtual_stages: int | str,
    num_chunks: int | str,
    memory_knob: int | None,
    partition: float | Sequence[int] | str,
    layers: Sequence[int] | None,
) -> Knobs:
    """The strategy's arguments as the planner knows them; "balanced", the default, leaves the boundaries free."""
    names: dict[object, float | None] = {"even": 0.0, "balanced": None}
    return Knobs(
        virtual_stages=virtual_stages if isinstance(virtual_stages, int) else None,
        num_chunks=num_chunks if isinstance(num_chunks, int) else None,
        memory_knob=memory_knob,
        partition=names[partition] if isinstance(partition, str) else _frozen(partition),
        layers=None if layers is None else tuple(layers),
    )


def training_of(model: nn.Module, precision: str, device: torch.device) -> Training:
    """Bytes and shares of a model that is trained with AdamW, as far as they show in its parameters."""
    parameters = list(model.parameters())
    count = max(sum(parameter.numel() for parameter in parameters), 1)
    weight = sum(parameter.numel() * parameter.element_size() for parameter in parameters) / count
    # Of lower precision than float32, a step's gradients are summed in that.
    sums = sum(parameter.numel() * max(parameter.element_size(), 4) for parameter in parameters) / count
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    mixed = precision.endswith("-mixed")
    return Training(
        activation_bytes=2 if mixed else weight,
        weight_bytes=weight + (2 if mixed else 0),  # the copies that autocast keeps for a step
        gradient_bytes=sums,
        optimizer_bytes=_ADAM * weight,
        trainable_share=trained / count,
        recompute=any(getattr(module, "gradient_checkpointing", False) for module in model.modules()),
        logits_slice=CPU_SLICE if device.type == "cpu" else ACCELERATOR_SLICE,
    )


def machine_of(device: torch.device) -> Machine:
    """The preset whose name is part of the device's, an H100 for other accelerators; the CPU's for a CPU."""
    if device.type == "cpu":
        return MACHINES["cpu"]
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    return next((machine for preset, machine in MACHINES.items() if preset in name), MACHINES["h100"])


def _memory(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory * (1 - SPARE)


def _read(path: str, shape: ModelShape) -> Profile:
    try:
        return Profile.from_json(Path(path).read_text(), shape)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"profile={path!r} cannot be used: {reason}") from error


def _frozen(partition: float | Sequence[int]) -> float | tuple[int, ...]:
    return tuple(partition) if isinstance(partition, Sequence) else float(partition)


def _rounded_up(length: int) -> int:
    """To a number with three leading binary digits, so that batches of similar lengths share a plan."""
    step = 1 << max(length.bit_length() - 3, 0)
    return -(-length // step) * step
