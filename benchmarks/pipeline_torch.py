"""torch.distributed.pipelining as a contender: its schedules, timed unit by unit, and their simulation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from benchmarks.pipeline_contender import Job, Name, Step, Units
from benchmarks.pipeline_stack import Part, WholePart, token_losses
from lightning_seq1f1b.runtime.batching import IGNORE_INDEX
from lightning_seq1f1b.schedule.actions import Action, Kind, Unit

SINGLE = {"torch.gpipe": ScheduleGPipe, "torch.1f1b": Schedule1F1B}
DOUBLE = {"torch.interleaved_1f1b": ScheduleInterleaved1F1B, "torch.zbv": ScheduleZBVZeroBubble}


class TimedStage(PipelineStage):
    """Appends every unit that it computes to a list, which the stages of a rank share."""

    units: list[tuple[Action, float]]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Forward of a microbatch."""
        start = time.thread_time()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._note(Kind.F, fwd_chunk_id, start)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of a microbatch, or the part that gives the gradient of its input."""
        start = time.thread_time()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._note(Kind.B if full_backward else Kind.I, bwd_chunk_id, start)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The part that gives the gradients of the weights."""
        start = time.thread_time()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._note(Kind.W, bwd_chunk_id, start)

    def _note(self, kind: Kind, microbatch: int, start: float) -> None:
        self.units.append((Action(kind, self.stage_index, Unit(microbatch, 0)), time.thread_time() - start))


class TorchContender:
    """One of torch's schedules.

    Args:
        name: its schedule is a key of `SINGLE` (one stage on a rank) or `DOUBLE` (two).
        job: what to do.
    """

    def __init__(self, name: Name, job: Job) -> None:
        self.name = name
        sizes, dtype, ranks = job.sizes, job.dtype, job.num_ranks
        if name.schedule in SINGLE:
            num_stages, indices = ranks, [job.rank]
        else:
            num_stages = 2 * ranks
            second = num_stages - 1 - job.rank if name.schedule == "torch.zbv" else ranks + job.rank
            indices = [job.rank, second]
        self._parts = [WholePart(Part(sizes, index, num_stages, dtype), name.attention) for index in indices]
        self._units: list[tuple[Action, float]] = []
        stages = []
        for part, index in zip(self._parts, indices, strict=True):
            stage = TimedStage(part, index, num_stages, torch.device("cpu"), *_examples(job, index, num_stages))
            stage.units = self._units
            stages.append(stage)
        count = job.microbatches
        if name.schedule in SINGLE:
            self._schedule = SINGLE[name.schedule](stages[0], n_microbatches=count, loss_fn=self._loss)
        else:
            self._schedule = DOUBLE[name.schedule](stages, n_microbatches=count, loss_fn=self._loss)
        self._first, self._last = 0 in indices, num_stages - 1 in indices
        self._ids, self._targets = job.input_ids(), job.targets()

    def parameters(self) -> list[nn.Parameter]:
        """See `Contender.parameters`."""
        return [parameter for part in self._parts for parameter in part.parameters()]

    def step(self) -> Step:
        """See `Contender.step`."""
        self._units.clear()
        losses: list[Tensor] = []
        given = (self._ids,) if self._first else ()
        targets = {"target": self._targets, "losses": losses} if self._last else {}
        # Without the logits of the whole batch, which nobody asks for.
        self._schedule.step(*given, return_outputs=False, **targets)
        loss = float(torch.stack(losses).detach().mean()) if losses else None
        return Step(loss, list(self._units))

    def simulated(self, units: Sequence[Units]) -> float:
        """See `Contender.simulated`."""
        return replay(units)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        start = time.thread_time()
        loss = token_losses(logits, targets) / (targets != IGNORE_INDEX).sum()
        action, seconds = self._units[-1]
        self._units[-1] = action, seconds + time.thread_time() - start
        return loss


def _examples(job: Job, index: int, num_stages: int) -> tuple[Tensor, Tensor]:
    """Input and output of a stage, of which torch wants to know the shapes; they must want gradients."""
    hidden = torch.empty(1, job.sizes.length, job.sizes.hidden, dtype=job.dtype, device="meta", requires_grad=True)
    logits = torch.empty(1, job.sizes.length, job.sizes.vocabulary, dtype=job.dtype, device="meta", requires_grad=True)
    ids = torch.empty(1, job.sizes.length, dtype=torch.int64, device="meta")
    return ids if index == 0 else hidden, logits if index == num_stages - 1 else hidden


def replay(units: Sequence[Units]) -> float:
    """The length of a step whose ranks compute whole microbatches in the given order, each as soon as it can.

    A forward waits for the previous stage's, a backward for the next stage's or on the last one for its forward, the
    gradients of weights for nothing that an order could violate. Messages take no time.
    """
    last = max(action.stage for row in units for action, _ in row)
    clock, place = [0.0] * len(units), [0] * len(units)
    ends: dict[tuple[str, int, int], float] = {}
    remaining = sum(len(row) for row in units)
    while remaining:
        before = remaining
        for rank, row in enumerate(units):
            while place[rank] < len(row):
                action, seconds = row[place[rank]]
                stage, microbatch = action.stage, action.unit.microbatch
                ready: float | None = 0.0
                if action.kind is Kind.F and stage > 0:
                    ready = ends.get(("forward", stage - 1, microbatch))
                elif action.kind in (Kind.B, Kind.I) and stage < last:
                    ready = ends.get(("backward", stage + 1, microbatch))
                if ready is None:
                    break
                clock[rank] = max(clock[rank], ready) + seconds
                if action.kind is not Kind.W:
                    direction = "forward" if action.kind is Kind.F else "backward"
                    ends[direction, stage, microbatch] = clock[rank]
                place[rank] += 1
                remaining -= 1
        if remaining == before:
            raise ValueError("the ranks wait for each other: this is no order that a pipeline could have run")
    return max(clock)
