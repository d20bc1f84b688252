"""Runs the contenders of the pipeline benchmark in turns, and makes rows of what they took."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.live_bytes import LiveBytes, SampledTrace
from benchmarks.pipeline_contender import Contender, Job, Name, Units
from benchmarks.pipeline_memory import activation_growth, peak_allocated, tokens_in_flight
from benchmarks.pipeline_ours import OurContender
from benchmarks.pipeline_prediction import Sample, fit_profile, idle_share, predicted_bubble
from benchmarks.pipeline_torch import TorchContender
from lightning_seq1f1b.runtime.topology import Groups
from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.timeline import Event

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-3, "float64": 1e-9}
"""Relative, of loss and gradient norm between pipelines; they add in different orders."""


@dataclass
class Record:
    """What one rank has seen of one contender.

    Attributes:
        loss: where the last stage is, else None.
        squared_norm: of the gradients on this rank.
        peak_bytes: of the first step.
        held: bytes of activations after each of its actions; empty for torch's schedules.
        wall: seconds of every round, both ranks together.
        cpu: CPU seconds of every round, of all threads of this process.
        units: of every round.
        events: of every round.
    """

    loss: float | None = None
    squared_norm: float = 0.0
    peak_bytes: int = 0
    held: list[tuple[Action, int]] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    units: list[Units] = field(default_factory=list)
    events: list[Sequence[Event]] = field(default_factory=list)

    def best_units(self) -> Units:
        """Every unit with the best of its times. The rounds may differ in their order; the first one's is kept."""
        best: dict[Any, float] = {}
        for units in self.units:
            for action, seconds in units:
                best[action] = min(best.get(action, math.inf), seconds)
        return [(action, best[action]) for action, _ in self.units[0]]


def build(name: Name, job: Job, groups: Groups) -> Contender:
    """The contender of a name."""
    return TorchContender(name, job) if name.schedule.startswith("torch.") else OurContender(name, job, groups)


def run_once(contender: Contender, record: Record) -> None:
    """One timed step."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step = contender.step()
    cpu = time.process_time() - cpu
    dist.barrier()
    record.wall.append(time.perf_counter() - wall)
    record.cpu.append(cpu)
    record.units.append(step.units)
    record.events.append(step.events)


def run_first(contender: Contender, record: Record) -> None:
    """The first step, which sets up what stays, watched for its memory and its numbers."""
    weights = contender.parameters()
    for parameter in weights:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in weights]

    def step() -> None:
        if isinstance(contender, OurContender):
            with LiveBytes([*weights, *gradients]) as live:
                trace = SampledTrace(live)
                record.loss = contender.run(trace)
            record.held = trace.samples
        else:
            record.loss = contender.step().loss

    record.peak_bytes = peak_allocated(step)
    record.squared_norm = sum(float(gradient.double().square().sum()) for gradient in gradients)


def clear(contender: Contender) -> None:
    """Drop the gradients, and what reference cycles keep alive."""
    for parameter in contender.parameters():
        parameter.grad = None
    gc.collect()


def measure(job: Job, dtype: str, every: Sequence[Name], rounds: int, groups: Groups) -> list[dict[str, Any]]:
    """Rows of the result for one dtype and number of microbatches; none but on rank 0."""
    contenders = [build(name, job, groups) for name in every]
    records = [Record() for _ in every]

    def run(turn: str, step: Callable[[Contender, Record], None]) -> None:
        start = time.perf_counter()
        for contender, record in zip(contenders, records, strict=True):
            step(contender, record)
            clear(contender)
        if job.rank == 0:
            seconds = time.perf_counter() - start
            print(f"{dtype}, {job.microbatches} microbatches: {turn}, {seconds:.0f} s", flush=True)

    run("memory and numbers", run_first)
    for turn in range(rounds):
        run(f"round {turn + 1} of {rounds}", run_once)
    gathered: list[list[Record]] = [[] for _ in range(job.num_ranks)]
    dist.all_gather_object(gathered, records)
    if job.rank > 0:
        return []
    seen = list(zip(*gathered, strict=True))
    rows = [row(contender, job, dtype, both) for contender, both in zip(contenders, seen, strict=True)]
    check_numbers(rows, TOLERANCES[dtype])
    add_predictions(contenders, seen, rows)
    return rows


def row(contender: Contender, job: Job, dtype: str, seen: Sequence[Record]) -> dict[str, Any]:
    """One line of the result, from all ranks' records."""
    seconds = min(seen[0].wall)
    (loss,) = [record.loss for record in seen if record.loss is not None]
    return {
        **asdict(contender.name),
        "dtype": dtype,
        "microbatches": job.microbatches,
        "seq_len": job.sizes.length,
        "hidden_size": job.sizes.hidden,
        "tokens_per_s": job.microbatches * job.sizes.length / seconds,
        "simulated_s": contender.simulated([record.best_units() for record in seen]),
        "peak_bytes": max(record.peak_bytes for record in seen),
        "step_s": seconds,
        "cpu_s": sum(min(record.cpu) for record in seen),
        "loss": loss,
        "grad_norm": math.sqrt(sum(record.squared_norm for record in seen)),
    }


def check_numbers(rows: Sequence[dict[str, Any]], tolerance: float) -> None:
    """Refuse to report speeds of pipelines that compute different things.

    Raises:
        RuntimeError: losses or gradient norms differ.
    """
    for entry in ("loss", "grad_norm"):
        expected = rows[0][entry]
        for given in rows:
            if not math.isclose(given[entry], expected, rel_tol=tolerance):
                raise RuntimeError(
                    f"{given['schedule']} ({given['partition']}, {given['chunks']} chunks, {given['attention']}) has "
                    f"{entry} {given[entry]}, but {rows[0]['schedule']} has {expected}"
                )


def add_predictions(
    contenders: Sequence[Contender], seen: Sequence[Sequence[Record]], rows: Sequence[dict[str, Any]]
) -> None:
    """Add to the rows of this package's pipelines what theory says of their bubble and memory, and what was."""
    ours = [
        (contender, records, line)
        for contender, records, line in zip(contenders, seen, rows, strict=True)
        if isinstance(contender, OurContender)
    ]
    samples: dict[tuple[int, str], list[Sample]] = {}
    for contender, records, _ in ours:
        group = samples.setdefault((contender.plan.num_stages, contender.name.attention), [])
        for record in records:
            group += [(action, contender.spans[action.unit.chunk], best) for action, best in record.best_units()]
    fits = {key: fit_profile(group) for key, group in samples.items()}
    for contender, records, line in ours:
        num_stages, num_ranks = contender.plan.num_stages, len(records)
        fastest = min(range(len(records[0].wall)), key=records[0].wall.__getitem__)
        line["bubble"] = idle_share((event for record in records for event in record.events[fastest]), num_ranks)
        profile = fits[num_stages, contender.name.attention]
        line["bubble_predicted"] = predicted_bubble(contender.plan, contender.spans, profile)
        units = contender.plan.virtual_stages * contender.name.chunks
        grown = max(activation_growth(record.held, units) for record in records)
        line["activation_of_formula"] = grown / tokens_in_flight(contender.plan, contender.spans)
