"""What the pipeline benchmark asks of a pipeline, whoever wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.pipeline_stack import Sizes
from lightning_seq1f1b.runtime.batching import shift_labels
from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.timeline import Event

Units = Sequence[tuple[Action, float]]
"""What a rank computed in one step, in order, each with its thread CPU seconds."""


@dataclass(frozen=True)
class Name:
    """Which pipeline, with which options. Its fields are fields of the result.

    Attributes:
        schedule: a schedule of this package, or one of torch's with `torch.` in front.
        partition: how sequences are cut, "even" or "balanced"; "whole" for none.
        chunks: of each sequence.
        attention: one of `pipeline_stack.ATTENTIONS`.
    """

    schedule: str
    partition: str
    chunks: int
    attention: str

    def __str__(self) -> str:
        """For progress and errors."""
        cut = "" if self.partition == "whole" else f" {self.partition} k={self.chunks}"
        return f"{self.schedule}{cut}, {self.attention}"


@dataclass(frozen=True)
class Job:
    """What all pipelines do: the same rows through the same weights.

    Attributes:
        rank: this process.
        num_ranks: all processes.
        sizes: of the stack and the rows.
        dtype: of the weights.
        microbatches: rows, each a microbatch.
    """

    rank: int
    num_ranks: int
    sizes: Sizes
    dtype: torch.dtype
    microbatches: int

    def input_ids(self) -> Tensor:
        """[microbatches, length]; also the labels, not shifted."""
        shape = (self.microbatches, self.sizes.length)
        return torch.randint(0, self.sizes.vocabulary, shape, generator=torch.Generator().manual_seed(0))

    def targets(self) -> Tensor:
        """[microbatches, length]: the shifted labels."""
        return shift_labels(self.input_ids())


@dataclass(frozen=True)
class Step:
    """One step on one rank.

    Attributes:
        loss: mean over all supervised tokens; None where the last stage is elsewhere.
        units: what was computed.
        events: the same on the wall clock; empty where it was not taken.
    """

    loss: float | None
    units: Units
    events: Sequence[Event] = field(default_factory=list)


class Contender(Protocol):
    """A pipeline on one rank."""

    name: Name

    def parameters(self) -> list[nn.Parameter]:
        """Those of the stages on this rank."""
        ...

    def step(self) -> Step:
        """Run all microbatches forward and backward; gradients are added to `.grad`."""
        ...

    def simulated(self, units: Sequence[Units]) -> float:
        """The length of a step in seconds when every rank's units take the given seconds and nothing else does."""
        ...
