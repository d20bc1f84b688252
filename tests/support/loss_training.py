"""Modules with losses of their own, trained in double precision on one device or over stages, and what they showed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from support.exact_training import Model, Recorder, Run
from support.float64 import float64_throughout
from support.tiny_models import VOCAB_SIZE, tiny_model
from support.training import QUIET
from torch.utils.data import DataLoader, Dataset

from lightning_seq1f1b import Seq1F1BStrategy, chunked_loss

ROWS, LENGTH, BATCH = 8, 23, 4
BETA = 0.3

Batch = dict[str, torch.Tensor]


class PairedRows(Dataset):
    """Rows with weights, a teacher's logits and reference log-probabilities; each two belong together.

    Padded on the right to different lengths when `padded`.
    """

    def __init__(self, padded: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(3, VOCAB_SIZE, (ROWS, LENGTH), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 1 / 3, -100)
        self.columns = {
            "input_ids": ids,
            "labels": labels,
            "loss_weights": torch.rand(ids.shape, generator=generator, dtype=torch.float64) * 2,
            "teacher_logits": torch.randn(*ids.shape, VOCAB_SIZE, generator=generator, dtype=torch.float64),
            "reference": -30 * torch.rand(ROWS, generator=generator, dtype=torch.float64),
        }
        if padded:
            lengths = torch.tensor([9, 12, 23, 5, 17, 20, 14, 16])[:, None]
            mask = (torch.arange(LENGTH)[None] < lengths).long()
            self.columns |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Batch:
        return {name: column[index] for name, column in self.columns.items()}


def some(batch: Batch, *names: str) -> Batch:
    """What every model takes, and the entries of these names."""
    known = ("input_ids", "labels", "attention_mask", *names)
    return {name: batch[name] for name in known if name in batch}


class Weighted(Model):
    """Cross-entropy with a weight for each token."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return chunked_loss(self.model, some(batch, "loss_weights")).loss


def divergence(
    logits: torch.Tensor, labels: torch.Tensor, teacher_logits: torch.Tensor, num_items_in_batch: torch.Tensor
) -> dict[str, torch.Tensor]:
    """KL divergence from a teacher; the z-loss and the share of good guesses are looked at only."""
    supervised = labels != -100
    teacher, student = teacher_logits.log_softmax(-1), logits.log_softmax(-1)
    apart = F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    return {
        "loss": (apart * supervised).sum() / num_items_in_batch,
        "z_loss": (logits.logsumexp(-1).square() * supervised).sum() / num_items_in_batch,
        "in_top_30": (logits.topk(30).indices == labels[..., None]).sum() / num_items_in_batch,
    }


class Distilled(Model):
    """Divergence from a teacher, with metrics that are logged on all ranks."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        given = chunked_loss(self.model, some(batch, "teacher_logits"), divergence)
        self.log_dict(dict(given.metrics))
        return given.loss


def sequence_log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """One value a row."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return {"log_probability": -losses.view(labels.shape).sum(1)}


class Preferred(Model):
    """DPO: rows in pairs, the chosen answer first."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        pairs = len(batch["input_ids"]) // 2

        def dpo(sums: dict[str, torch.Tensor], reference: torch.Tensor) -> dict[str, torch.Tensor]:
            reward = BETA * (sums["log_probability"] - reference)
            margin = reward[0::2] - reward[1::2]
            return {"loss": -F.logsigmoid(margin).sum() / pairs, "margin": margin.sum() / pairs, "reward": reward}

        batch = some(batch, "reference")
        given = chunked_loss(self.model, batch, sequence_log_probabilities, dpo, rows_together=2)
        self.log("margin", given.metrics["margin"])
        self.log_dict({f"reward_{row}": reward for row, reward in enumerate(given.metrics["reward"])})
        return given.loss


class Tempered(Model):
    """Trained numbers beside the model, one used for every chunk and one at the end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.offset = torch.nn.Parameter(torch.tensor(-20.0, dtype=torch.float64))

    def tempered(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return sequence_log_probabilities(logits / self.temperature, labels)

    def reached(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss": F.softplus((self.offset - sums["log_probability"]) / 9).sum()}

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return chunked_loss(self.model, some(batch), self.tempered, self.reached).loss


def smoothed(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """A loss function for models of transformers: cross-entropy with smoothed labels."""
    targets = F.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    items = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
    losses = F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1), reduction="sum", label_smoothing=0.2)
    return losses / items


class Smoothed(Model):
    """A loss function that the user has set on the model."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.loss_function = smoothed

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self.model(**some(batch)).loss


class Counted(Model):
    """The model's own loss, divided by a number that the user gives."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self.model(**some(batch), num_items_in_batch=11 + batch_idx).loss


class Unsupervised(Model):
    """No token has a target, neither for the model's own loss nor for one with weights."""

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        batch = {**batch, "labels": torch.full_like(batch["labels"], -100)}
        if batch_idx:
            return chunked_loss(self.model, some(batch, "loss_weights")).loss
        return self.model(**some(batch)).loss


MODULES: dict[str, type[Model]] = {
    "weighted": Weighted,
    "distilled": Distilled,
    "preferred": Preferred,
    "tempered": Tempered,
    "smoothed": Smoothed,
    "counted": Counted,
    "unsupervised": Unsupervised,
}


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        module: a name in `MODULES`.
        strategy: arguments of `Seq1F1BStrategy`.
        family: of the tiny model, whose embeddings are tied.
        padded: rows of different lengths.
    """

    module: str
    strategy: tuple[tuple[str, Any], ...] = ()
    family: str = "llama"
    padded: bool = False


class MetricRecorder(Callback):
    """Keeps what was logged in every training step."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@dataclass
class Outcome:
    """What a training showed on one rank."""

    run: Run
    logged: list[dict[str, float]] = field(default_factory=list)


def train(case: Case, devices: int | None) -> Outcome:
    """Two steps, by our strategy on `devices` ranks, or on one device when None."""
    tiny_model(case.family)  # loads what is lifted to double precision
    where: dict[str, Any] = {"devices": 1, "strategy": "auto"}
    if devices is not None:
        where = {"devices": devices, "strategy": Seq1F1BStrategy(**dict(case.strategy))}
    recorder, metrics = Recorder(), MetricRecorder()
    with float64_throughout():
        torch.manual_seed(0)
        trainer = L.Trainer(**QUIET, max_epochs=1, precision="64-true", **where, callbacks=[recorder, metrics])
        module = MODULES[case.module](case.family, torch.float64, tie_word_embeddings=True)
        trainer.fit(module, DataLoader(PairedRows(case.padded), batch_size=BATCH))
    return Outcome(recorder.run, metrics.logged)


def train_all(rank: int, devices: int, cases: tuple[Case, ...]) -> list[Outcome]:
    """For `run_processes`: several trainings one after the other on the same processes."""
    return [train(case, devices) for case in cases]
