"""One pipelined step on one process: agree on the batch, plan, cut, execute, and share the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_seq1f1b.runtime.agreement import check_same_batch, check_same_plan
from lightning_seq1f1b.runtime.batching import cut_batch, split_rows
from lightning_seq1f1b.runtime.executor import Executor
from lightning_seq1f1b.runtime.gradients import sum_where_any
from lightning_seq1f1b.runtime.stage import Stage
from lightning_seq1f1b.runtime.topology import Groups, Topology
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.runtime.transport import BACKWARD, FORWARD, ProcessTransport
from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.partition import partition
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.spans import Span

FORWARD_ONLY = "forward"
"""The schedule of evaluation."""

MIN_AUTO_CHUNK = 1024
"""Tokens below which an automatic choice makes no further chunk: smaller kernels lose more than the bubble gains."""

MAX_AUTO_CHUNKS_PER_RANK = 4
"""An automatic choice stops here: the bubble, (p - 1) T / k, is then under a quarter of one microbatch's time."""


@dataclass(frozen=True)
class Cutting:
    """How batches are cut and in which order they run.

    Attributes:
        schedule: name of a policy, such as "seq1f1b".
        num_microbatches: at most this many; None for one sequence each.
        num_chunks: chunks of every sequence; None to choose by its length.
        partition: "balanced" (equal work), "even" (equal tokens), a number between 0 (even) and 1 (balanced), or the
            chunks' lengths.
        multiple: chunk lengths are rounded to it where the sequence is long enough.
        virtual_stages: stages on each rank.
        memory_knob: see `schedule.plan.make_plan`.
        activation_cap: see `schedule.plan.make_plan`.
    """

    schedule: str = "seq1f1b"
    num_microbatches: int | None = None
    num_chunks: int | None = None
    partition: float | Sequence[int] | str = "balanced"
    multiple: int = 1
    virtual_stages: int = 1
    memory_knob: int | None = None
    activation_cap: int | None = None

    def for_batch(self, rows: int, length: int) -> Cutting:
        """How a batch of `rows` sequences of `length` tokens is cut: like any other, unless a subclass decides."""
        return self

    def spans(self, length: int, num_stages: int, shape: ModelShape) -> tuple[Span, ...]:
        """The chunks of a sequence of `length` tokens."""
        return partition(self.partition, length, self._chunks(length, num_stages), shape, self.multiple)

    def _chunks(self, length: int, num_stages: int) -> int:
        if self.num_chunks is not None:
            return self.num_chunks
        if isinstance(self.partition, Sequence) and not isinstance(self.partition, str):
            return len(self.partition)
        if POLICIES[self.schedule].whole_rows:
            return 1
        return max(1, min(length // MIN_AUTO_CHUNK, MAX_AUTO_CHUNKS_PER_RANK * num_stages))

    def plan(self, rows: int, spans: Sequence[Span], num_stages: int, *, training: bool) -> Plan:
        """The verified plan for a batch of `rows` sequences."""
        schedule = self.schedule if training else FORWARD_ONLY
        return make_plan(
            schedule,
            num_stages,
            len(split_rows(rows, self.num_microbatches)),
            len(spans),
            virtual_stages=self.virtual_stages,
            memory_knob=self.memory_knob if training else None,
            activation_cap=self.activation_cap if training else None,
        )


class Pipeline:
    """Runs batches through all stages; one object on every process.

    Args:
        stages: the stages this process holds, by their index.
        topology: where this process stands.
        groups: its process groups.
        cutting: how batches are cut.
        shape: the model's dimensions, for chunks of equal work.
        tied: parameters of this rank that the last, or first, rank holds too.
        outside: parameters that every rank holds; hooks may use them within some stage's layers.
        loss_dtype: of the returned loss; float32, or float64 for a double-precision model.
        device: where the stages compute.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        topology: Topology,
        groups: Groups,
        cutting: Cutting,
        shape: ModelShape,
        tied: Sequence[nn.Parameter],
        outside: Sequence[nn.Parameter],
        loss_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.topology, self.groups, self.cutting, self.shape = topology, groups, cutting, shape
        self.tied, self.outside = tied, outside
        self.loss_dtype, self.device = loss_dtype, device
        directions = {FORWARD: groups.forward, BACKWARD: groups.backward}
        transport = ProcessTransport(topology.pipeline_ranks, directions, device)
        self.executor = Executor(stages, transport, topology.pipeline_rank, device)
        # Dropout on the CPU draws from the process's generator. Ranks draw different amounts, so the step runs on a
        # stream of its own: outside it all ranks stay in step, and a RandomSampler shuffles alike on all of them.
        self._random_state: Tensor | None = None
        self._compared: set[tuple[int, int, bool]] = set()

    def run(self, batch: Mapping[str, Tensor], *, training: bool, trace: StepTrace | None = None) -> Tensor:
        """Run one batch; gradients are added to the parameters' `.grad` when `training`.

        Args:
            batch: as for `runtime.batching.cut_batch`; equal on all pipeline ranks.
            training: forward and backward, else forward only.
            trace: collects the times of this rank's compute actions.

        Returns:
            The batch's loss, 0-d, without autograd, equal on all pipeline ranks.

        Raises:
            ValueError: on every rank, before any activation moves, when the ranks' batches or plans differ or the batch
                cannot be cut as asked.
        """
        # Also what else decides the plan, which must be the same on all ranks.
        settings = {"gradients enabled": torch.tensor(training)}
        check_same_batch({**batch, **settings}, self.groups.control)
        rows, length = batch["input_ids"].shape
        ranks = self.topology.num_stages
        cutting = self.cutting.for_batch(rows, length)
        spans = cutting.spans(length, ranks, self.shape)
        plan = cutting.plan(rows, spans, ranks, training=training)
        microbatches = cut_batch(batch, cutting.num_microbatches, spans)
        self._check_same_plan(plan, spans, (rows, length, training))
        if trace is not None:
            trace.plan, trace.spans = plan, spans
        with self._own_random_stream():
            results = self.executor.run(plan, microbatches, trace)
        if training:
            # The copies then take identical optimizer steps and stay one weight.
            if self.tied:
                sum_where_any(self.tied, self.groups.ends)
            sum_where_any(self.outside, self.groups.pipeline)
        return self._share(None if results is None else torch.stack([each["loss"] for each in results]).sum())

    def _check_same_plan(self, plan: Plan, spans: Sequence[Span], batch: tuple[int, int, bool]) -> None:
        """Compare the plans for a new shape of batch: a planner that saw another machine on some rank may differ.

        The shape, on which the ranks have agreed, decides whether they compare: a collective needs all of them.
        """
        if batch not in self._compared:
            # Of integers alone: the hashes of strings differ from process to process.
            bounds = tuple((span.start, span.stop) for span in spans)
            check_same_plan(hash((plan.rows, plan.stage_to_rank, bounds)), self.groups.control)
            self._compared.add(batch)

    @contextmanager
    def _own_random_stream(self) -> Iterator[None]:
        if self.topology.num_stages == 1:
            yield
            return
        if self._random_state is None:
            seed = torch.initial_seed() + 1 + self.topology.rank
            self._random_state = torch.Generator().manual_seed(seed).get_state()
        outside = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        try:
            yield
        finally:
            self._random_state = torch.get_rng_state()
            torch.set_rng_state(outside)

    def _share(self, loss: Tensor | None) -> Tensor:
        shared = torch.zeros((), dtype=self.loss_dtype, device=self.device)
        if loss is not None:
            shared.copy_(loss)
        dist.broadcast(shared, self.topology.pipeline_ranks[-1], group=self.groups.pipeline)
        return shared
