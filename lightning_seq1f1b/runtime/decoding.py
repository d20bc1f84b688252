"""Runs rows further through all stages, forward only, from where their caches stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seq1f1b.runtime.agreement import check_same_turn
from lightning_seq1f1b.runtime.batching import Chunk, Microbatch
from lightning_seq1f1b.runtime.executor import Executor
from lightning_seq1f1b.runtime.pipeline import FORWARD_ONLY, MAX_AUTO_CHUNKS_PER_RANK, MIN_AUTO_CHUNK, Pipeline
from lightning_seq1f1b.runtime.stage import Stage
from lightning_seq1f1b.runtime.wire import WireFormat
from lightning_seq1f1b.schedule.actions import Unit
from lightning_seq1f1b.schedule.partition import even
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.spans import Span


class Decoding:
    """One generation of text: new tokens go through all stages, and the logits behind the last come back to all ranks.

    Args:
        pipeline: whose connections are used.
        stages: the stages this process holds, by their index; their states outlive a run, and a result has "logits",
            [rows, 1, vocabulary].
    """

    def __init__(self, pipeline: Pipeline, stages: Mapping[int, Stage]) -> None:
        self.pipeline = pipeline
        topology, transport = pipeline.topology, pipeline.executor.transport
        position = pipeline.executor.position
        self._executor = Executor(stages, transport, topology.pipeline_rank, pipeline.device, position)
        self._format: WireFormat | None = None

    def agree(self, inputs: Mapping[str, Tensor] | None) -> None:
        """Make sure that all pipeline ranks are about to do the same.

        Args:
            inputs: what this rank will run; None if it generates nothing more.

        Raises:
            ValueError: on every rank, before anything is computed, when they are not.
        """
        check_same_turn(inputs, self.pipeline.groups.control)

    def run(self, inputs: Mapping[str, Tensor], start: int, row_ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Run new tokens, on which the ranks have agreed.

        Args:
            inputs: `input_ids` [rows, tokens], int64, the new tokens; `attention_mask` [rows, start + tokens], 1 for a
                real token, none without padding; `position_ids` [rows, tokens] or [1, tokens], none where the model
                counts itself.
            start: tokens that the rows have had before.
            row_ranges: first row, and the one behind the last, of every microbatch.

        Returns:
            The logits of the last token, [rows, 1, vocabulary], on every pipeline rank.
        """
        input_ids, pipeline, topology = inputs["input_ids"], self.pipeline, self.pipeline.topology
        spans = self._spans(input_ids.shape[1])
        microbatches = _cut(inputs, start, spans, row_ranges)
        virtual = pipeline.cutting.virtual_stages
        plan = make_plan(FORWARD_ONLY, topology.num_stages, len(microbatches), len(spans), virtual_stages=virtual)
        results = self._executor.run(plan, microbatches)
        logits = None if results is None else torch.cat([each["logits"] for each in results])
        return self._share(len(input_ids), logits)

    def _spans(self, length: int) -> tuple[Span, ...]:
        """Chunks of new tokens: as many as a row of a batch has, where there are so many tokens."""
        cutting, ranks = self.pipeline.cutting, self.pipeline.topology.num_stages
        count = cutting.num_chunks
        if count is None and POLICIES[cutting.schedule].whole_rows:
            count = 1
        if count is None:
            count = max(1, min(length // MIN_AUTO_CHUNK, MAX_AUTO_CHUNKS_PER_RANK * ranks))
        # Recurrent layers take a chunk of one token for a generated one, which is never padding.
        return even(length, max(1, min(count, length // 2)))

    def _share(self, rows: int, logits: Tensor | None) -> Tensor:
        groups, device = self.pipeline.groups, self.pipeline.device
        last = self.pipeline.topology.pipeline_ranks[-1]
        if self._format is None:
            told = torch.zeros(2, dtype=torch.int64, device=device)
            if logits is not None:
                told.copy_(WireFormat.of(logits).encode(device))
            dist.broadcast(told, last, group=groups.pipeline)
            self._format = WireFormat.decode(told)
        if logits is None:
            logits = torch.empty((rows, 1, self._format.hidden_size), dtype=self._format.dtype, device=device)
        logits = logits.contiguous()
        dist.broadcast(logits, last, group=groups.pipeline)
        return logits


def _cut(
    inputs: Mapping[str, Tensor], start: int, spans: Sequence[Span], row_ranges: Sequence[tuple[int, int]]
) -> list[Microbatch]:
    """New tokens as microbatches and chunks whose spans count from the beginning of the rows."""
    input_ids, mask, positions = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")
    length = start + input_ids.shape[1]
    last_position = torch.tensor(length - 1, device=input_ids.device)
    if positions is not None:
        last_position, positions = positions.max(), positions.expand_as(input_ids)

    def chunk(unit: Unit, rows: slice) -> Chunk:
        span = spans[unit.chunk]
        columns = slice(span.start, span.stop)
        return Chunk(
            unit=unit,
            span=Span(start + span.start, start + span.stop),
            length=length,
            input_ids=input_ids[rows, columns].contiguous(),
            position_ids=None if positions is None else positions[rows, columns].contiguous(),
            attention_mask=None if mask is None else mask[rows, : start + span.stop].contiguous(),
            real=None,
            labels=None,
            loss_denominator=torch.ones((), device=input_ids.device),
        )

    return [
        Microbatch(
            index=index,
            rows=last - first,
            length=length,
            chunks=tuple(chunk(Unit(index, number), slice(first, last)) for number in range(len(spans))),
            last_position=last_position,
            rows_of_batch=tuple(range(first, last)),
        )
        for index, (first, last) in enumerate(row_ranges)
    ]
