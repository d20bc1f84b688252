"""The demo's closing table, from what its two runs recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from lightning_seq1f1b.models.shape import model_shape
from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.balance import balanced_layers
from lightning_seq1f1b.schedule.costs import head_flops, layer_flops
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import simulate
from lightning_seq1f1b.schedule.timeline import Event, bubble, makespan


@dataclass(frozen=True)
class Run:
    """One run as its ranks recorded it: `ranks[0]["steps"]` are the steps of rank 0."""

    ranks: list[dict[str, Any]]

    @classmethod
    def read(cls, directory: Path) -> Run:
        """Read the files that `StepRecorder` wrote."""
        return cls([json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))])

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [step["loss"] for step in self.ranks[0]["steps"]]

    def mean_loss(self, epoch: int) -> float:
        """The mean over one pass of the text; -1 is the last pass."""
        steps = self.ranks[0]["steps"]
        wanted = steps[epoch]["epoch"]
        losses = [step["loss"] for step in steps if step["epoch"] == wanted]
        return sum(losses) / len(losses)

    @property
    def tokens_per_second(self) -> float:
        """Over all steps but the first, which also allocates."""
        steps = self.ranks[0]["steps"][1:]
        return float(sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps))

    @property
    def peak_memory(self) -> str:
        """Of every process, in GB."""
        return " + ".join(f"{rank['peak_bytes'] / 1e9:.1f}" for rank in self.ranks) + " GB"

    def measured_bubble(self) -> float:
        """Share of the step that the rank which waits most waits, the mean over all steps but the first."""
        shares = []
        for number in range(1, len(self.ranks[0]["steps"])):
            recorded = [event for rank in self.ranks for event in rank["steps"][number]["events"]]
            timeline = [Event(rank, Action.parse(action), start, end) for rank, action, start, end in recorded]
            shares.append(float(bubble(timeline) / makespan(timeline)))
        return sum(shares) / len(shares)


def predicted_bubble(run: Run, model: Path) -> float:
    """The same share, from the plan and the FLOPs of every chunk on every stage, before anything ran."""
    step = run.ranks[0]["steps"][0]
    plan = make_plan(*step["plan"])
    shape = model_shape(AutoConfig.from_pretrained(model))
    layers = balanced_layers(shape, plan.num_ranks)

    def cost(action: Action) -> float:
        start, stop = step["spans"][action.unit.microbatch][action.unit.chunk]
        last = action.stage == plan.num_stages - 1
        forward, both = (
            layers[action.stage] * layer_flops(shape, start, stop, training=training)
            + last * head_flops(shape, start, stop, training=training)
            for training in (False, True)
        )
        return forward if action.kind is Kind.F else both - forward

    simulation = simulate(plan, cost)
    return float(simulation.bubble / simulation.makespan)


def table(pipeline: Run, single: Run, model: Path) -> str:
    """Two columns: the pipeline, and the same steps on one device."""
    difference = max(abs(a - b) for a, b in zip(pipeline.losses, single.losses, strict=True))
    rows = [
        ("", f"{len(pipeline.ranks)} stages", "one device"),
        *(
            (f"loss of step {number}", f"{ours:.6f}", f"{theirs:.6f}")
            for number, (ours, theirs) in enumerate(zip(pipeline.losses, single.losses, strict=True), start=1)
        ),
        ("loss, first pass over the text", f"{pipeline.mean_loss(0):.4f}", f"{single.mean_loss(0):.4f}"),
        ("loss, last pass over the text", f"{pipeline.mean_loss(-1):.4f}", f"{single.mean_loss(-1):.4f}"),
        ("largest difference of a loss", f"{difference:.1e}", ""),
        ("tokens per second", f"{pipeline.tokens_per_second:.0f}", f"{single.tokens_per_second:.0f}"),
        ("bubble predicted from FLOPs", f"{predicted_bubble(pipeline, model):.1%} of a step", ""),
        ("bubble measured", f"{pipeline.measured_bubble():.1%} of a step", ""),
        ("peak memory of each process", pipeline.peak_memory, single.peak_memory),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "-" * (sum(widths) + 4)
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])
