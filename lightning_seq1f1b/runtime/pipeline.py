"""One pipelined step on one process: agree on the batch, plan, cut, execute, and share the loss."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

import torch
from torch import Tensor, nn

from lightning_seq1f1b.runtime.adding_up import check_adds_up
from lightning_seq1f1b.runtime.agreement import check_same_batch, check_same_plan, lowest
from lightning_seq1f1b.runtime.batching import cut_groups, row_ends
from lightning_seq1f1b.runtime.copied_gradients import CopiedGradients
from lightning_seq1f1b.runtime.executor import Executor
from lightning_seq1f1b.runtime.finite import FiniteCheck
from lightning_seq1f1b.runtime.objective import Objective, SummedObjective
from lightning_seq1f1b.runtime.position import Position
from lightning_seq1f1b.runtime.row_groups import RowGroup, group_rows
from lightning_seq1f1b.runtime.stage import Stage
from lightning_seq1f1b.runtime.step_load import Load
from lightning_seq1f1b.runtime.step_result import Sharing, StepResult
from lightning_seq1f1b.runtime.topology import Groups, Topology
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.runtime.transport import BACKWARD, FORWARD, ProcessTransport
from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.partition import partition, training_flops
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.sharing_out import chunk_counts
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
        num_chunks: chunks of every sequence where all are equally long; where they are not, so many on average, and
            more for those with more work. None to choose by the length.
        counts_longest: whether `num_chunks` is that of the longest sequence instead, and others have fewer.
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
    counts_longest: bool = False
    partition: float | Sequence[int] | str = "balanced"
    multiple: int = 1
    virtual_stages: int = 1
    memory_knob: int | None = None
    activation_cap: int | None = None

    def for_batch(self, rows: int, length: int) -> Cutting:
        """How a batch of `rows` sequences, the longest of `length` tokens, is cut: as any other, or as a subclass says.

        Args:
            rows: of the batch.
            length: tokens of its longest row, padding left out.
        """
        return self

    @property
    def is_listed(self) -> bool:
        """Whether the user has given the chunks' lengths, so that every row has their sum, padding included."""
        return isinstance(self.partition, Sequence) and not isinstance(self.partition, str)

    def groups(
        self, batch: Mapping[str, Tensor], together: int = 1, *, labels_alone_count: bool = True
    ) -> tuple[RowGroup, ...]:
        """The microbatches of a batch: which rows, and how many of their tokens.

        Args:
            batch: as for `runtime.batching.cut_groups`.
            together: see `group_rows`.
            labels_alone_count: see `row_ends`.
        """
        rows, length = batch["input_ids"].shape
        ends = [length] * rows if self.is_listed else row_ends(batch, labels_alone_count=labels_alone_count)
        return group_rows(ends, self.num_microbatches, together)

    def spans(self, length: int, num_stages: int, shape: ModelShape) -> tuple[Span, ...]:
        """The chunks of every sequence of a batch where all have `length` tokens."""
        return self._spans(length, self._chunks(length, num_stages), shape)

    def spans_of(self, groups: Sequence[RowGroup], num_stages: int, shape: ModelShape) -> tuple[tuple[Span, ...], ...]:
        """The chunks of every microbatch: of about the same work, or as many of each where all are equally long."""
        counts = self._counts(groups, num_stages, shape)
        return tuple(self._spans(group.length, count, shape) for group, count in zip(groups, counts, strict=True))

    def plan(self, chunks: Sequence[int], num_stages: int, *, training: bool, first_trained_stage: int = 0) -> Plan:
        """The verified plan for microbatches of so many chunks each; see `schedule.plan.make_plan`."""
        schedule = self.schedule if training else FORWARD_ONLY
        return make_plan(
            schedule,
            num_stages,
            len(chunks),
            tuple(chunks),
            virtual_stages=self.virtual_stages,
            memory_knob=self.memory_knob if training else None,
            activation_cap=self.activation_cap if training else None,
            first_trained_stage=first_trained_stage if training else 0,
        )

    def _counts(self, groups: Sequence[RowGroup], num_stages: int, shape: ModelShape) -> Sequence[int]:
        longest = max(group.length for group in groups)
        count = self._chunks(longest, num_stages)
        counts: Sequence[int] = [count] * len(groups)
        if self.is_listed:
            return counts
        if count > 1 and any(group.length != longest for group in groups):
            works = [len(group.rows) * _flops(group.length, shape) for group in groups]
            if self.counts_longest or self.num_chunks is None:
                counts = [ceil(count * work / max(works)) for work in works]
            else:
                counts = chunk_counts(works, count)
        return [min(count, group.length) for count, group in zip(counts, groups, strict=True)]

    def _chunks(self, length: int, num_stages: int) -> int:
        if self.num_chunks is not None:
            return self.num_chunks
        if isinstance(self.partition, Sequence) and not isinstance(self.partition, str):
            return len(self.partition)  # `is_listed`, said so that it shows in the type
        if POLICIES[self.schedule].whole_rows:
            return 1
        return max(1, min(length // MIN_AUTO_CHUNK, MAX_AUTO_CHUNKS_PER_RANK * num_stages))

    def _spans(self, length: int, num_chunks: int, shape: ModelShape) -> tuple[Span, ...]:
        given = self.partition
        spec = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else given
        return _partition(spec, length, num_chunks, shape, self.multiple)


_partition = lru_cache(maxsize=4096)(partition)


@lru_cache(maxsize=4096)
def _flops(length: int, shape: ModelShape) -> float:
    """What a row of `length` tokens takes, forward and backward."""
    return training_flops(shape)(0, length)


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
        position: where the process notes what it is at.

    Attributes:
        announce: called once, with the next plan that trains, the chunks of every microbatch and its rows.
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
        position: Position,
    ) -> None:
        self.topology, self.groups, self.cutting, self.shape = topology, groups, cutting, shape
        self.tied, self.outside = tied, outside
        self.loss_dtype, self.device = loss_dtype, device
        self._sharing = Sharing(topology.pipeline_ranks[-1], groups.pipeline, groups.control, loss_dtype, device)
        directions = {FORWARD: groups.forward, BACKWARD: groups.backward}
        transport = ProcessTransport(topology.pipeline_ranks, directions, device)
        self.executor = Executor(stages, transport, topology.pipeline_rank, device, position)
        # Dropout on the CPU draws from the process's generator. Ranks draw different amounts, so the step runs on a
        # stream of its own: outside it all ranks stay in step, and a RandomSampler shuffles alike on all of them.
        self.random_state: Tensor | None = None
        self.announce: Callable[[Plan, tuple[tuple[Span, ...], ...], tuple[int, ...]], None] | None = None
        self._compared: set[tuple[int, int, bool, int]] = set()
        self._tried: set[Hashable] = set()

    def run(
        self,
        batch: Mapping[str, Tensor],
        *,
        training: bool,
        trace: StepTrace | None = None,
        objective: Objective | None = None,
        loss_scale: Tensor | None = None,
        finite: FiniteCheck | None = None,
    ) -> StepResult:
        """Run one batch; gradients are added to the parameters' `.grad` when `training`, but for those in `copied`.

        Args:
            batch: as for `runtime.batching.cut_batch`; equal on all pipeline ranks.
            training: forward and backward, else forward only.
            trace: collects the times of this rank's compute actions.
            objective: what is asked of the batch; None for the model's own loss.
            loss_scale: see `Executor.run`; the loss that is returned is not scaled.
            finite: looks at all that is computed.

        Returns:
            The batch's loss and what else was asked for.

        Raises:
            ValueError: on every rank, before any activation moves, when the ranks' batches or plans differ or the batch
                cannot be cut as asked.
            FloatingPointError: on every rank, when `finite` has found anything on one.
        """
        position = self.executor.position
        position.enter("waiting for all stages to come with their batch")
        # Also what else decides the plan, which must be the same on all ranks.
        settings = {"gradients enabled": torch.tensor(training)}
        if objective is not None:
            batch = {**batch, **objective.tensors}
            settings |= objective.row_tensors
            settings["rows together"] = torch.tensor(objective.rows_together)
        check_same_batch({**batch, **settings}, self.groups.control)
        first_trained_stage = self._first_trained_stage() if training else 0
        training = training and first_trained_stage is not None
        together = 1 if objective is None else objective.rows_together
        ranks = self.topology.num_stages
        groups = self.cutting.groups(batch, together, labels_alone_count=objective is None)
        if isinstance(objective, SummedObjective):
            self._try(objective, batch, len(groups))
        rows, longest = len(batch["input_ids"]), groups[0].length
        cutting = self.cutting.for_batch(rows, longest)
        spans = cutting.spans_of(groups, ranks, self.shape)
        first = first_trained_stage or 0
        plan = cutting.plan(tuple(map(len, spans)), ranks, training=training, first_trained_stage=first)
        microbatches = cut_groups(batch, groups, spans)
        self._check_same_plan(plan, spans, (rows, longest, training, first))
        if trace is not None:
            trace.begin(plan, spans, Load.of(batch, groups, self.shape))
        if training and self.announce is not None:
            self.announce(plan, spans, tuple(len(group.rows) for group in groups))
            self.announce = None
        with self._own_random_stream():
            results = self.executor.run(plan, microbatches, trace, objective, loss_scale, finite)
        if finite is not None:
            position.enter("waiting for what all stages have found")
            finite.raise_first(plan, self.topology, self.groups.control)
        position.enter("waiting for the loss")
        copied: list[CopiedGradients] = []
        if training:
            # With the sums, copies take identical optimizer steps and stay one weight.
            copied.append(CopiedGradients(self.tied, self.groups.ends))
            copied.append(CopiedGradients(self.outside, self.groups.pipeline))
        if objective is None:
            result = self._sharing.loss(results)
        else:
            shape = (rows, batch["input_ids"].shape[1])
            result = self._sharing.everything(results, microbatches, shape)
        return replace(result, trained=training, copied=copied)

    def _try(self, objective: SummedObjective, batch: Mapping[str, Tensor], num_microbatches: int) -> None:
        trial = (objective.identity, "attention_mask" in batch, num_microbatches > 1)
        if trial not in self._tried:
            check_adds_up(objective, batch, self.shape.vocab_size, num_microbatches)
            self._tried.add(trial)

    def _first_trained_stage(self) -> int | None:
        """The first stage of the pipeline with something to train; None when nothing is. May change between steps."""
        # Parameters outside the model may be used by any stage.
        trained = [0] if any(parameter.requires_grad for parameter in self.outside) else []
        trained += [index for index, stage in self.executor.stages.items() if stage.trains]
        num_stages = self.topology.num_stages * self.cutting.virtual_stages
        first = lowest(min(trained, default=num_stages), self.groups.control)
        return None if first == num_stages else first

    def _check_same_plan(self, plan: Plan, spans: Sequence[Sequence[Span]], batch: tuple[int, int, bool, int]) -> None:
        """Compare the plans for a new shape of batch: a planner that saw another machine on some rank may differ.

        What `for_batch` is asked, on which the ranks have agreed, decides whether they compare: a collective needs all
        of them. All else follows from its answer and the batch.
        """
        if batch not in self._compared:
            # Of integers alone: the hashes of strings differ from process to process.
            bounds = tuple(tuple((span.start, span.stop) for span in row) for row in spans)
            check_same_plan(hash((plan.rows, plan.stage_to_rank, bounds)), self.groups.control)
            self._compared.add(batch)

    @contextmanager
    def _own_random_stream(self) -> Iterator[None]:
        if self.topology.num_stages == 1:
            yield
            return
        if self.random_state is None:
            seed = torch.initial_seed() + 1 + self.topology.rank
            self.random_state = torch.Generator().manual_seed(seed).get_state()
        outside = torch.get_rng_state()
        torch.set_rng_state(self.random_state)
        try:
            yield
        finally:
            self.random_state = torch.get_rng_state()
            torch.set_rng_state(outside)
