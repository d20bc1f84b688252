"""Measures forward, input gradient and weight gradient of a model's parts, run as the strategy runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from transformers import PreTrainedModel

from lightning_seq1f1b.cli.sample_model import NUM_LAYERS
from lightning_seq1f1b.models.split import cut
from lightning_seq1f1b.models.stage import make_stages
from lightning_seq1f1b.runtime.batching import cut_batch
from lightning_seq1f1b.runtime.executor import Executor
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.schedule.actions import Kind
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.profile import PASSES
from lightning_seq1f1b.schedule.spans import Span, spans

PARTS = ("embedding and layer", "layer", "layer and head")
KINDS = dict(zip((Kind.F, Kind.I, Kind.W), PASSES, strict=True))

Times = dict[tuple[int, str, int], float]
"""Seconds by stage (as in `PARTS`), pass (as in `PASSES`) and chunk."""


class ProcessorTrace(StepTrace):
    """Counts the thread's own time on a processor, so that other programs on the machine do not show."""

    def _now(self) -> float:
        return time.thread_time()


class AloneTransport:
    """Of a rank that has no neighbours: all stages are its own."""

    def send(self, *args: object) -> NoReturn:
        """Never called."""
        raise AssertionError("a pipeline of one rank sends nothing")

    def receive(self, *args: object) -> NoReturn:
        """Never called."""
        raise AssertionError("a pipeline of one rank receives nothing")

    def finish(self) -> None:
        """Nothing is on its way."""


@dataclass(frozen=True)
class Measurement:
    """The shortest times of several rounds.

    Attributes:
        spans: the chunks that were measured.
        times: of every part, pass and chunk.
        rounds: how often each was measured.
    """

    spans: tuple[Span, ...]
    times: Times
    rounds: int


class Measuring:
    """Runs a model of three layers, one on each of three stages in this process, chunk by chunk.

    Args:
        model: with `NUM_LAYERS` layers, on its device; it is cut in place.
        vocab_size: tokens to draw from.
        rows: rows of a microbatch.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int, rows: int) -> None:
        self.device = next(model.parameters()).device
        self.vocab_size, self.rows = vocab_size, rows
        layers = [range(layer, layer + 1) for layer in range(NUM_LAYERS)]
        # A profile tells the head's forward from its backward, which slices do together.
        stages = make_stages(cut(model, range(NUM_LAYERS), layers), slices_logits=False)
        self._executor = Executor(stages, AloneTransport(), 0, self.device)

    def once(self, lengths: Sequence[int]) -> Times:
        """The times of one row of chunks of these lengths, in tokens."""
        chunks = spans(lengths)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocab_size, (self.rows, chunks[-1].stop), generator=generator).to(self.device)
        plan = make_plan("interleaved_seq1f1b_zb", 1, 1, len(chunks), virtual_stages=NUM_LAYERS)
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        trace = (ProcessorTrace if alone else StepTrace)(0, self.device)
        self._executor.run(plan, cut_batch({"input_ids": ids, "labels": ids}, 1, chunks), trace)
        return {
            (event.action.stage, KINDS[event.action.kind], event.action.unit.chunk): float(event.end - event.start)
            for event in trace.events
        }

    def shortest(self, lengths: Sequence[int], seconds: float, progress: Callable[[int, int], None]) -> Measurement:
        """The shortest time of each, of as many rounds as fit into some seconds, two at least.

        Other work on the machine makes single times too long, never too short.
        """
        best: Times = {}
        rounds, began = 0, time.monotonic()
        most = 10
        self.once(lengths)  # the first one also makes gradients, workspaces and kernels
        while rounds < 2 or (rounds < most and (time.monotonic() - began) * (rounds + 1) / rounds < seconds):
            for key, value in self.once(lengths).items():
                best[key] = min(value, best.get(key, value))
            rounds += 1
            progress(rounds, most)
        return Measurement(spans(lengths), best, rounds)

    def affordable(self, seconds: float) -> Iterator[int]:
        """Chunk lengths so that one round over a row of them takes about this long: each twice the one before."""
        unit = 16 if self.device.type == "cpu" else 256
        self.once([unit])
        began = time.monotonic()
        self.once([unit])
        per_token = max(time.monotonic() - began, 1e-6) / unit
        largest = 256 if self.device.type == "cpu" else 1024
        while unit < largest and row_length(_doubled(2 * unit)) * per_token < seconds:
            unit *= 2
        sizes = _doubled(unit)
        yield from sizes if row_length(sizes) * per_token < seconds else sizes[:-1]


def row_of(sizes: Sequence[int]) -> list[int]:
    """Chunk lengths of the row that is measured: every size early and late, behind few tokens and behind many."""
    return [*sizes, *reversed(sizes)]


def row_length(sizes: Sequence[int]) -> int:
    """Tokens of that row."""
    return sum(row_of(sizes))


def _doubled(unit: int) -> list[int]:
    return [unit, 2 * unit, 4 * unit, 8 * unit]
