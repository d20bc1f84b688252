"""The runtime of this package as a contender: real plans, executor and transport."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.pipeline_contender import Job, Name, Step, Units
from benchmarks.pipeline_stack import ChunkedPart, Part
from lightning_seq1f1b.runtime.batching import cut_batch
from lightning_seq1f1b.runtime.executor import Executor
from lightning_seq1f1b.runtime.topology import Groups
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.runtime.transport import BACKWARD, FORWARD, ProcessTransport
from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.partition import partition
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import simulate

CPU = torch.device("cpu")
VIRTUAL_STAGES = {"seq1f1b": 1, "interleaved_seq1f1b_zb": 2}
"""The schedules that compete, each with its stages on a rank."""


@dataclass
class CpuTrace(StepTrace):
    """Takes the thread CPU time of every unit beside its time on the wall clock."""

    units: list[tuple[Action, float]] = field(default_factory=list)

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        """Time the body as `action`."""
        start = time.thread_time()
        with super().measure(action):
            yield
        self.units.append((action, time.thread_time() - start))


class OurContender:
    """One of this package's schedules.

    Args:
        name: its schedule is a key of `VIRTUAL_STAGES`.
        job: what to do.
        groups: process groups that all contenders share.
    """

    def __init__(self, name: Name, job: Job, groups: Groups) -> None:
        self.name, self._rank = name, job.rank
        sizes, virtual = job.sizes, VIRTUAL_STAGES[name.schedule]
        num_stages = virtual * job.num_ranks
        self.stages = {
            index: ChunkedPart(Part(sizes, index, num_stages, job.dtype), index, num_stages, name.attention)
            for index in range(job.rank, num_stages, job.num_ranks)
        }
        self.plan = make_plan(name.schedule, job.num_ranks, job.microbatches, name.chunks, virtual_stages=virtual)
        # The multiple of the strategy on a CPU.
        self.spans = partition(name.partition, sizes.length, name.chunks, sizes.shape, multiple=16)
        ids = job.input_ids()
        self._microbatches = cut_batch({"input_ids": ids, "labels": ids}, None, self.spans)
        transport = ProcessTransport(range(job.num_ranks), {FORWARD: groups.forward, BACKWARD: groups.backward}, CPU)
        self._executor = Executor(self.stages, transport, job.rank, CPU)

    def parameters(self) -> list[nn.Parameter]:
        """See `Contender.parameters`."""
        return [parameter for stage in self.stages.values() for parameter in stage.part.parameters()]

    def step(self) -> Step:
        """See `Contender.step`."""
        trace = CpuTrace(self._rank, CPU)
        loss = self.run(trace)
        return Step(loss, trace.units, trace.events)

    def run(self, trace: StepTrace) -> float | None:
        """One step, watched by any trace."""
        results = self._executor.run(self.plan, self._microbatches, trace)
        return None if results is None else float(sum(result["loss"] for result in results))

    def simulated(self, units: Sequence[Units]) -> float:
        """See `Contender.simulated`."""
        seconds = dict(unit for row in units for unit in row)
        return float(simulate(self.plan, seconds.__getitem__, early_weight_grads=True).makespan)
