"""Rows of any length, padded at any side or packed: the numbers of every document computed alone on one device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from support.exact_training import Model, Recorder, Run
from support.float64 import float64_throughout
from support.processes import run_processes
from support.tiny_models import tiny_batch, tiny_model
from support.training import QUIET
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_seq1f1b import PackingCollator, Seq1F1BStrategy
from lightning_seq1f1b.runtime.batching import IGNORE_INDEX, shift_labels

Batch = dict[str, Tensor]

TOLERANCE = 1e-10


def documents(*lengths: int) -> list[Batch]:
    """Rows of their own; the first label is never a target."""
    made = [tiny_batch(1, length, seed=seed) for seed, length in enumerate(lengths)]
    for document in made:
        document["labels"][:, 0] = IGNORE_INDEX
    return made


def padded(rows: list[Batch], side: str) -> Batch:
    """Rows in one batch with a mask; those padded at the left have positions that count real tokens."""
    longest = max(row["input_ids"].shape[1] for row in rows)

    def stacked(name: str, value: int) -> Tensor:
        shapes = [longest - row["input_ids"].shape[1] for row in rows]
        widths = [(missing, 0) if side == "left" else (0, missing) for missing in shapes]
        tensors = [row.get(name, torch.ones_like(row["input_ids"])) for row in rows]
        padded = [torch.nn.functional.pad(*each, value=value) for each in zip(tensors, widths, strict=True)]
        return torch.cat(padded)

    batch = {"input_ids": stacked("input_ids", 0), "labels": stacked("labels", IGNORE_INDEX)}
    batch["attention_mask"] = stacked("attention_mask", 0)
    if side == "left":
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return batch


def packed(rows: list[Batch], length: int) -> Batch:
    return PackingCollator(length)([{name: row[0] for name, row in row.items()} for row in rows])


def one_after_the_other(rows: list[Batch]) -> Batch:
    """All documents in one row, as transformers' DataCollatorWithFlattening would put them, in their order."""
    batch = {name: torch.cat([row[name] for row in rows], 1) for name in ("input_ids", "labels")}
    return {**batch, "position_ids": torch.cat([torch.arange(row["labels"].shape[1]) for row in rows])[None]}


def with_padding_only(batch: Batch) -> Batch:
    """The batch with a further row of padding alone."""
    empty = {name: torch.zeros_like(tensor[:1]) for name, tensor in batch.items()}
    empty["labels"].fill_(IGNORE_INDEX)
    return {name: torch.cat([tensor, empty[name]]) for name, tensor in batch.items()}


class Eager(Model):
    """With the attention that every family has."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = tiny_model(self.family, self.model_dtype)


class Alone(Eager):
    """The truth: runs every document of a batch by itself, whatever the batch looks like."""

    def training_step(self, batch: list[Batch], batch_idx: int) -> Tensor:
        items = sum((shift_labels(document["labels"]) != IGNORE_INDEX).sum() for document in batch).clamp(min=1)
        losses = [self.model(**document, num_items_in_batch=items).loss for document in batch]
        return torch.stack(losses).sum()


TEN = documents(9, 1, 3, 12, 2, 7, 5, 4, 3, 2)
LENGTHS = documents(64, 1000, 333, 5)
FEW = documents(17, 40, 6, 23)
SHORT = documents(6, 3)
SILENT = documents(12, 7, 9)
for document in SILENT[:2]:
    document["labels"][:] = IGNORE_INDEX

CHUNKS = [9, 6, 10, 2, 21]
"""Borders between documents (9, 25) and inside them (15, 27)."""

PAIRS: dict[str, tuple[list[Batch], Batch, str, dict[str, Any]]] = {
    "packed-in-one-row": (TEN, one_after_the_other(TEN), "llama", {"partition": CHUNKS}),
    "packed-under-windows": (TEN, one_after_the_other(TEN), "mistral", {"num_chunks": 5}),
    "packed-with-learned-positions": (TEN, one_after_the_other(TEN), "gpt2", {"partition": CHUNKS}),
    "packed-under-sinks": (TEN, one_after_the_other(TEN), "gpt_oss", {"num_chunks": 4}),
    "packed-and-padded": (TEN, packed(TEN, 13), "llama", {"num_chunks": 3}),
    "packed-and-padded-in-one-microbatch": (TEN, packed(TEN, 20), "gemma2", {"num_chunks": 4, "num_microbatches": 1}),
    "a-long-one-beside-packed-ones": (LENGTHS + TEN, packed(LENGTHS + TEN, 100), "llama", {"num_chunks": 3}),
    "four-lengths": (LENGTHS, padded(LENGTHS, "right"), "llama", {"num_chunks": 4}),
    "four-lengths-on-virtual-stages": (
        LENGTHS,
        padded(LENGTHS, "right"),
        "llama",
        {"num_chunks": 3, "schedule": "interleaved_seq1f1b_zb", "virtual_stages": 2},
    ),
    "four-lengths-automatically": (LENGTHS, padded(LENGTHS, "right"), "llama", {"schedule": "auto"}),
    "padded-at-the-right": (FEW, padded(FEW, "right"), "gpt2", {"num_chunks": 3}),
    "padded-at-the-left": (FEW, padded(FEW, "left"), "gpt2", {"num_chunks": 3}),
    "padded-at-the-left-in-one-microbatch": (
        FEW,
        padded(FEW, "left"),
        "llama",
        {"num_chunks": 3, "num_microbatches": 1},
    ),
    "padded-at-the-right-before-a-recurrence": (FEW, padded(FEW, "right"), "qwen3_next", {"num_chunks": 2}),
    "fewer-tokens-than-chunks": (SHORT, padded(SHORT, "right"), "llama", {"num_chunks": 9}),
    "fewer-tokens-than-chunks-in-equal-rows": (
        SHORT[:1],
        padded(SHORT[:1], "right"),
        "llama",
        {"num_chunks": 9, "partition": "even"},
    ),
    "a-row-of-padding-only": (FEW, with_padding_only(padded(FEW, "right")), "llama", {"num_chunks": 3}),
    "a-row-of-padding-only-beside-others": (
        FEW,
        with_padding_only(padded(FEW, "left")),
        "gemma2",
        {"num_chunks": 3, "num_microbatches": 2},
    ),
    "rows-with-nothing-supervised": (SILENT, padded(SILENT, "right"), "llama", {"num_chunks": 3}),
}
"""Documents, a batch of them, a family, and how the batch is cut."""


NOTHING = {
    "one-microbatch": {"num_chunks": 2, "num_microbatches": 1},
    "padding-only-alone": {"num_chunks": 2},
}
"""How a batch without a supervised token is cut."""


def train(batch: Batch | list[Batch], family: str, strategy: Seq1F1BStrategy | None) -> Run:
    tiny_model(family)  # loads what is lifted to double precision
    recorder = Recorder()
    where = {"devices": 1, "strategy": "auto"} if strategy is None else {"devices": 2, "strategy": strategy}
    module_class = Alone if isinstance(batch, list) else Eager
    with float64_throughout():
        torch.manual_seed(0)
        options = {**QUIET, "max_epochs": 1, "precision": "64-true"}
        trainer = L.Trainer(**options, **where, callbacks=[recorder])
        trainer.fit(module_class(family, dtype=torch.float64), DataLoader([batch], batch_size=None))
    return recorder.run


def train_all(rank: int, names: list[str]) -> list[Run]:
    """For `run_processes`."""
    runs = [train(PAIRS[name][1], PAIRS[name][2], Seq1F1BStrategy(**PAIRS[name][3])) for name in names]
    silent = with_padding_only(padded(SILENT[:2], "left"))
    return [*runs, *(train(silent, "llama", Seq1F1BStrategy(**options)) for options in NOTHING.values())]


@pytest.fixture(scope="module")
def in_a_pipeline() -> dict[str, list[Run]]:
    """The results of every rank by name."""
    by_rank = run_processes(train_all, 2, list(PAIRS))
    return {name: [runs[index] for runs in by_rank] for index, name in enumerate([*PAIRS, *NOTHING])}


@pytest.mark.parametrize("name", PAIRS)
def test_every_document_as_if_alone(name: str, in_a_pipeline: dict[str, list[Run]]) -> None:
    rows, _, family, _ = PAIRS[name]
    truth = train(rows, family, None)
    assert truth.losses[0] > 0.1
    (expected,) = truth.gradients
    runs = in_a_pipeline[name]
    floor = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.values())
    assert set().union(*(run.gradients[0] for run in runs)) == set(expected)
    for run in runs:
        assert run.losses == pytest.approx(truth.losses, abs=TOLERANCE)
        for parameter, gradient in run.gradients[0].items():
            scale = max(float(expected[parameter].abs().max()), floor)
            assert float((gradient - expected[parameter]).abs().max()) <= TOLERANCE * scale, parameter


@pytest.mark.parametrize("name", NOTHING)
def test_a_batch_with_nothing_supervised_has_loss_zero(name: str, in_a_pipeline: dict[str, list[Run]]) -> None:
    for run in in_a_pipeline[name]:
        assert run.losses == [0.0]
        for parameter, gradient in run.gradients[0].items():
            assert not gradient.any(), parameter
