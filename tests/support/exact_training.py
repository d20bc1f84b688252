"""A short training in double precision throughout, on one device or by any schedule: losses and every gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from peft import LoraConfig, get_peft_model
from support.float64 import float64_throughout
from support.tiny_models import tiny_model
from support.training import QUIET, FineTune, Rows
from torch.utils.data import DataLoader

from lightning_seq1f1b import Seq1F1BStrategy

NUM_LAYERS = 8
"""Enough for two stages on each of four ranks."""

LENGTH = 33


class Model(FineTune):
    """A module whose optimizer's steps are small and linear in the gradients."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Adapted(Model):
    """The same with LoRA on every linear layer; all else is frozen."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            super().configure_model()
            torch.manual_seed(1)
            config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
            self.model = get_peft_model(self.model, config).double()


MODELS: dict[str, tuple[type[Model], dict[str, Any]]] = {
    "tied": (Model, {"tie_word_embeddings": True}),
    "lora": (Adapted, {}),
    "gpt2": (Model, {"family": "gpt2", "tie_word_embeddings": False}),
    "routers": (Model, {"family": "mixtral", "output_router_logits": True, "router_aux_loss_coef": 0.5}),
}
"""Modules by name, with arguments of theirs. GPT-2 has biases, and weights the other way round; "routers" has a part of
its loss that belongs to all layers and tokens together."""


@dataclass
class Run:
    """What a training showed on one rank.

    Attributes:
        losses: of every training step.
        gradients: of every training step, by the parameters' names; the rank's own, before the optimizer's step.
        validation: the loss of the validation row after the last step.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    validation: float = 0.0


class Recorder(Callback):
    """Writes down a `Run`."""

    def __init__(self) -> None:
        self.run = Run()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        named = pl_module.named_parameters()
        self.run.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any) -> None:
        self.run.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.run.validation = float(trainer.callback_metrics["val_loss"])


def train(model: str, devices: int | None, strategy: dict[str, Any]) -> Run:
    """Two steps and a validation, by our strategy on `devices` ranks, or on one device when None."""
    tiny_model("llama")  # loads what is lifted to double precision
    tiny_model("gpt2")
    tiny_model("mixtral")
    where = {"devices": 1, "strategy": "auto"}
    if devices is not None:
        where = {"devices": devices, "strategy": Seq1F1BStrategy(**strategy)}
    recorder = Recorder()
    module_class, arguments = MODELS[model]
    train_rows, val_rows = (Rows(count, seed=seed, length=LENGTH) for seed, count in ((1, 5), (2, 1)))
    with float64_throughout():
        torch.manual_seed(0)
        options = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0, "precision": "64-true"}
        trainer = L.Trainer(**options, **where, callbacks=[recorder])
        module = module_class(dtype=torch.float64, num_hidden_layers=NUM_LAYERS, **arguments)
        trainer.fit(module, DataLoader(train_rows, batch_size=3), DataLoader(val_rows))
    return recorder.run


def train_all(rank: int, devices: int, cases: list[tuple[str, dict[str, Any]]]) -> list[Run]:
    """For `run_processes`: several trainings one after the other on the same processes."""
    return [train(model, devices, strategy) for model, strategy in cases]


def largest_difference(by_rank: list[Run], truth: Run) -> float:
    """The largest difference of a loss, and of a gradient relative to its largest entry; every name must be there.

    A gradient that is rounding noise around zero is compared relative to a millionth of the model's largest gradient.
    """
    differences = [0.0]
    for run in by_rank:
        assert len(run.losses) == len(run.gradients) == len(truth.gradients) == 2
        given, wanted = [*run.losses, run.validation], [*truth.losses, truth.validation]
        differences += [abs(one - other) for one, other in zip(given, wanted, strict=True)]
    for step, expected in enumerate(truth.gradients):
        floor = 1e-6 * max(float(gradient.abs().max()) for gradient in expected.values())
        assert set().union(*(run.gradients[step] for run in by_rank)) == set(expected)
        for run in by_rank:
            for name, gradient in run.gradients[step].items():
                scale = max(float(expected[name].abs().max()), floor)
                differences.append(float((gradient - expected[name]).abs().max()) / scale)
    return max(differences)
