"""From what every rank has seen of some training steps to the numbers that are logged, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import NamedTuple

GIB = 2.0**30


class Run(NamedTuple):
    """One rank's part of one pipelined run, in seconds.

    Attributes:
        began: when the rank knew the batch.
        start: of its first action.
        end: of its last action.
        busy: how long it computed.
    """

    began: float
    start: float
    end: float
    busy: float


@dataclass
class Seen:
    """What one rank has seen since the last report.

    Attributes:
        machine: ranks with the same one read the same clock.
        runs: of the pipeline; several a step with accumulated gradients.
        steps: of the optimizer.
        seconds: of training, from the end of a batch to the end of the next.
        data_seconds: how much of that the Trainer waited for data.
        tokens: of the rank's replica, without padding.
        supervised: those that have a label.
        flops: of the model, see `PipelineMonitor`.
        peak_bytes: the most memory held so far.
    """

    machine: str
    runs: list[Run] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    tokens: int = 0
    supervised: int = 0
    flops: float = 0.0
    peak_bytes: float = 0.0


Reduce = Callable[[list[float], str], list[float]]
"""Numbers of every replica -> their sums or maxima, by "sum" or "max"."""


def report(ranks: Sequence[Seen], reduce: Reduce, num_replicas: int, peak_flops: float | None) -> dict[str, float]:
    """The metrics of `PipelineMonitor`, by name.

    Args:
        ranks: what the pipeline ranks of this replica have seen.
        reduce: joins the replicas; called on all ranks alike.
        num_replicas: how many there are.
        peak_flops: FLOP/s that one device could reach; None where that is not known.
    """
    first, num_ranks = ranks[0], len(ranks)
    length = sum(map(_length, zip(*_on_one_clock(ranks), strict=True)))
    spent = [sum(run.busy for run in rank.runs) for rank in ranks]
    peaks = [rank.peak_bytes for rank in ranks]
    seconds, waited = (max(getattr(rank, name) for rank in ranks) for name in ("seconds", "data_seconds"))
    tokens, supervised, flops, length, *busy = reduce(
        [first.tokens, first.supervised, first.flops, length, *spent], "sum"
    )
    seconds, waited, *peaks = reduce([seconds, waited, *peaks], "max")
    metrics = {
        "step_seconds": seconds / first.steps,
        "data_seconds": waited / first.steps,
        "tokens_per_second": tokens / seconds,
        "supervised_tokens_per_second": supervised / seconds,
    }
    if length > 0:
        metrics["bubble"] = 1 - sum(busy) / (num_ranks * length)
        metrics |= {f"bubble/rank_{rank}": 1 - time / length for rank, time in enumerate(busy)}
    if peak_flops is not None:
        metrics["mfu"] = flops / (seconds * num_ranks * num_replicas * peak_flops)
    metrics |= {f"peak_memory_gib/rank_{rank}": held / GIB for rank, held in enumerate(peaks) if not isnan(held)}
    return {f"pipeline/{name}": value for name, value in metrics.items()}


def _on_one_clock(ranks: Sequence[Seen]) -> list[list[Run]]:
    if len({rank.machine for rank in ranks}) == 1:
        return [rank.runs for rank in ranks]
    # All ranks begin a run at one moment, but for the time of a message.
    return [[Run(0.0, run.start - run.began, run.end - run.began, run.busy) for run in rank.runs] for rank in ranks]


def _length(runs: Sequence[Run]) -> float:
    """From the first start to the last end on any rank."""
    return max(run.end for run in runs) - min(run.start for run in runs)
