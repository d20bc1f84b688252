"""What is said before the first batch: its cut as it runs, and no number that is far from what is then measured."""

from __future__ import annotations

import functools
import logging
import re
import time
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.fitting import TWO_STAGES, everywhere, fit, rows, stages
from support.training import FineTune, Rows
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.estimate import MACHINES, Training
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.spans import spans
from lightning_seq1f1b.strategy.first_batch import TOLERANCE
from lightning_seq1f1b.strategy.forecast import Batch, forecast

GIB = 2.0**30
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "head_dim": 32,
    "vocab_size": 2000,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
}
"""Wide enough for what a step holds to be more than what a library keeps beside it."""


class Said(logging.Handler):
    """Keeps what the strategy logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Said:
        logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(self)
        return self

    def __exit__(self, *args: object) -> None:
        logging.getLogger("lightning.pytorch.utilities.rank_zero").removeHandler(self)

    @property
    def first_batch(self) -> list[str]:
        return [line for line in self.lines if "the first batch" in line]


class Allocations(Callback):
    """The most bytes that one batch, not the first, had allocated at once on top of what was there before."""

    def __init__(self, batch: int) -> None:
        self.batch, self.peak = batch, 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        if index == self.batch:
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.__enter__()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if getattr(self, "profiler", None) is None:
            return
        self.profiler.__exit__(None, None, None)
        events = [event for event in self.profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            self.peak = max(self.peak, held)
        self.profiler = None


def held(family: str, accumulate: int, options: dict[str, Any], arguments: dict[str, Any], where: Any) -> Any:
    """What was said, and the bytes that this rank then held."""
    overrides = {name: WIDE[name] for name in WIDE if family != "gpt2" or name not in ("intermediate_size", "head_dim")}
    module, allocations = FineTune(family, **overrides), Allocations(2 * accumulate - 1)
    loader = DataLoader(Rows(4 * accumulate, length=512), batch_size=2)
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "accumulate_grad_batches": accumulate, **options}
    with Said() as said:
        where = stages(where.devices, **arguments)
        trainer = fit(where, module, loader, callbacks=[allocations], **options)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    (optimizer,) = trainer.optimizers
    state = sum(v.numel() * v.element_size() for each in optimizer.state.values() for v in each.values())
    # Gradients of the batches before are held all the time, and those of the step are part of its allocations.
    before = weights if accumulate > 1 else 0
    return said.first_batch, weights + state + before + allocations.peak


SETTINGS: dict[str, tuple] = {
    "llama": ("llama", 1, {}, {"num_chunks": 4}),
    "gpt2": ("gpt2", 1, {}, {"num_chunks": 4, "schedule": "interleaved_seq1f1b_zb", "virtual_stages": 2}),
    "accumulated": ("llama", 2, {}, {"num_chunks": 2, "num_microbatches": 1}),
}
MEMORY = {name: functools.partial(held, *setting) for name, setting in SETTINGS.items()}


class Unpredictable(FineTune):
    """An optimizer whose state nobody has counted."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters(), lr=1e-3)


def unpredictable(where: Any) -> list[str]:
    """An optimizer and a precision for which nobody has compared predictions."""
    with Said() as said:
        fit(where, Unpredictable(), rows(3), max_epochs=1)
        fit(where, FineTune(), rows(3), max_epochs=1, precision="bf16-mixed")
    return said.lines


def ragged(where: Any) -> list[str]:
    """Rows of very different lengths, and planned automatically: the planner's own words suffice."""
    with Said() as said:
        loader = DataLoader(Rows(3, padded=True, length=60), batch_size=3)
        fit(stages(where.devices, num_chunks=4), FineTune(), loader, max_epochs=1)
        fit(stages(where.devices, num_chunks=3, schedule="auto"), FineTune(), rows(), max_epochs=1)
    return said.first_batch


CASES = (*MEMORY.values(), unpredictable, ragged)


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_what_was_said(name: str) -> None:
    (said, first), (unsaid, second) = everywhere(CASES, TWO_STAGES)[MEMORY[name]]
    assert unsaid == []
    (line,) = said
    numbers = re.search(r"memory of the ranks, about: ([\d.e-]+), ([\d.e-]+) GiB", line)
    assert numbers
    assert [float(number) * GIB for number in numbers.groups()] == pytest.approx([first, second], rel=TOLERANCE)


def test_the_cut_and_the_idle_share_are_said() -> None:
    (said, _), _ = everywhere(CASES, TWO_STAGES)[MEMORY["llama"]]
    begin = "Seq1F1B: the first batch runs as 2 microbatch(es) of 1 row(s) in 4 chunk(s) each, of "
    assert said[0].startswith(begin)
    assert re.search(r"of \d+, \d+, \d+, \d+ tokens; by its FLOPs the ranks wait for \d+\.\d% of the step;", said[0])


def test_nothing_is_said_of_memory_that_is_not_known() -> None:
    first, second = everywhere(CASES, TWO_STAGES)[unpredictable]
    lines = [line for line in first if "the first batch" in line]
    assert ["GiB" in line for line in lines] == [False, False]
    assert "layers on each pipeline rank: 0: 0-1, 1: 2-3" in "\n".join(first)
    assert second == []


def test_ragged_and_planned_batches() -> None:
    padded, planned = everywhere(CASES, TWO_STAGES)[ragged][0]
    assert re.search(r"3 microbatch\(es\) of 1 row\(s\) in \d to \d chunk\(s\) each; by its FLOPs", padded)
    assert "by its FLOPs" not in planned  # the planner has said so before


def test_it_takes_no_time() -> None:
    """The largest step that is simulated at all."""
    shape = ModelShape(32, 4096, 32, 8, 128, 14336, True, 128256)
    plan = make_plan("seq1f1b", 8, 39, 16)
    chunks = spans([512] * 16)
    batch = Batch(plan, (chunks,) * 39, (1,) * 39)
    began = time.process_time()
    expected = forecast(batch, shape, [4] * 8, Training(), MACHINES["h100"])
    assert time.process_time() - began < 1.0
    assert batch.actions == 9984
    assert 0 < expected.idle < 0.5
    assert expected.seconds is not None
    assert expected.activations[0] > expected.activations[6] > GIB / 8
