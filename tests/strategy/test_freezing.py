"""Frozen parameters: trained as on one device, and stages before the first trained one run no backwards."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.fitting import ONE_DEVICE, Case, Where, difference, everywhere, fit, rows, stages, weights
from support.float64 import float64_throughout
from support.processes import run_processes
from support.tiny_models import tiny_model
from support.training import QUIET, FineTune

from lightning_seq1f1b import Seq1F1BStrategy
from lightning_seq1f1b.schedule.actions import Kind

TOLERANCE = 1e-10


class Frozen(FineTune):
    """A tiny model in double precision of which only the parameters with some names are trained."""

    def __init__(self, *trained: str, recompute: bool = False, **overrides: Any) -> None:
        super().__init__("llama", torch.float64, **overrides)
        self.trained, self.recompute = trained, recompute

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        super().configure_model()
        if self.recompute:
            self.model.gradient_checkpointing_enable()
        self.train_only(*self.trained)

    def train_only(self, *names: str) -> None:
        """Freeze everything else; knows nothing of stages."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(part in name for part in names))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Unfreezing(Callback):
    """Trains more of the model from the second epoch on, and less in the third."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Frozen) -> None:
        names = [("layers.3",), ("layers.1", "layers.3", "lm_head"), ("lm_head",)]
        pl_module.train_only(*names[trainer.current_epoch])


class Scaled(Frozen):
    """Trains a factor of its own, which a hook uses within the first layer, and the head."""

    def configure_model(self) -> None:
        if not hasattr(self, "factor"):
            self.factor = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
            super().configure_model()
            self.model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * self.factor)


class Backwards(Callback):
    """Which stages ran backwards in each step, as far as this rank knows."""

    def __init__(self) -> None:
        self.stages: list[set[int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        events = getattr(getattr(trainer.strategy, "last_step", None), "events", ())
        self.stages.append({event.action.stage for event in events if event.action.kind in (Kind.B, Kind.I)})


IN_TURN = {"schedule": "interleaved_seq1f1b", "virtual_stages": 2}

SETTINGS: dict[str, tuple[partial[Frozen], dict[str, Any], dict[str, Any], list[set[int]]]] = {
    "half": (partial(Frozen, "layers.2", "layers.3", "model.norm"), {"gradient_clip_val": 0.05}, {}, [set(), {1}]),
    "half, in turn": (
        partial(Frozen, "layers.3", "layers.2.mlp"),
        {},
        {**IN_TURN, "schedule": "interleaved_seq1f1b_zb"},
        [{2}, {3}],
    ),
    "recomputed": (partial(Frozen, "layers.1", "layers.3", recompute=True), {}, IN_TURN, [{2}, {1, 3}]),
    "head": (partial(Frozen, "lm_head"), {}, {}, [set(), {1}]),
    "tied": (partial(Frozen, "embed_tokens", tie_word_embeddings=True), {}, {}, [{0}, {1}]),
    "outside": (partial(Scaled, "factor", "lm_head"), {}, {}, [{0}, {1}]),
    "middle": (partial(Frozen, "layers.0", "layers.3"), {}, {"schedule": "seq1f1b_zb"}, [{0}, {1}, {2}]),
    "last": (partial(Frozen, "lm_head", "model.norm"), {}, {}, [set(), set(), {2}]),
}
"""A module, arguments of the Trainer and of the strategy, and the stages of every rank that should run backwards."""


def frozen(name: str, where: Where) -> dict[str, Any]:
    """Losses and weights after two steps; which stages ran backwards."""
    make_module, trainer_arguments, strategy_arguments, _ = SETTINGS[name]
    if where != ONE_DEVICE:
        where = stages(where.devices, trace=True, **strategy_arguments)
    return result(where, make_module(), max_epochs=1, **trainer_arguments)


def result(where: Where, module: Frozen, *callbacks: Callback, **options: Any) -> dict[str, Any]:
    tiny_model("llama")  # loads what is lifted to double precision
    backwards = Backwards()
    with float64_throughout():
        options = {"precision": "64-true", "num_sanity_val_steps": 0, **options}
        trainer = fit(where, module, rows(5), callbacks=[backwards, *callbacks], **options)
        loss = float(trainer.callback_metrics["train_loss_epoch"])
        return {"loss": loss, "weights": weights(trainer), "backwards": backwards.stages}


def unfrozen_later(where: Where) -> dict[str, Any]:
    if where != ONE_DEVICE:
        where = stages(where.devices, trace=True)
    return result(where, Frozen("layers.3"), Unfreezing(), max_epochs=3)


class Selected(Frozen):
    """Gives the optimizer what is trained, and nothing else: some stages have none of it."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def resumed(where: Where) -> dict[str, Any]:
    """Saved after one epoch, and gone on with for another."""
    path = Path(tempfile.gettempdir()) / f"frozen-{os.environ.get('MASTER_PORT', os.getpid())}.ckpt"
    options = {"precision": "64-true", "num_sanity_val_steps": 0}
    tiny_model("llama")
    with float64_throughout():
        fit(where, Selected("layers.3"), rows(5), max_epochs=1, **options).save_checkpoint(path)
        strategy = where.strategy if isinstance(where.strategy, str) else Seq1F1BStrategy(**dict(where.strategy))
        trainer = L.Trainer(devices=where.devices, strategy=strategy, max_epochs=2, **QUIET, **options)
        trainer.fit(Selected("layers.3"), rows(5), ckpt_path=path)
        state = trainer.strategy.optimizer_state(trainer.optimizers[0])
        after = weights(trainer)
    trainer.strategy.barrier()
    path.unlink(missing_ok=True)
    return {"loss": float(trainer.callback_metrics["train_loss_epoch"]), "weights": after, "optimizer": state}


CASES: dict[str, Case] = {
    **{name: partial(frozen, name) for name in SETTINGS},
    "unfrozen later": unfrozen_later,
    "resumed": resumed,
}
FOR = {2: [name for name in CASES if name not in ("middle", "last")], 3: ["middle", "last"]}


def results(num_ranks: int, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Of all ranks, and of one device."""
    cases = tuple(CASES[each] for each in FOR[num_ranks])
    (expected,) = everywhere((CASES[name],), ONE_DEVICE)[CASES[name]]
    return everywhere(cases, stages(num_ranks))[CASES[name]], expected


@pytest.mark.parametrize(("num_ranks", "name"), [(num_ranks, name) for num_ranks in FOR for name in FOR[num_ranks]])
def test_equals_one_device(num_ranks: int, name: str) -> None:
    by_rank, expected = results(num_ranks, name)
    assert all(abs(each["loss"] - expected["loss"]) < TOLERANCE for each in by_rank)
    assert difference(by_rank[0]["weights"], expected["weights"]) < TOLERANCE


@pytest.mark.parametrize(
    ("num_ranks", "name"), [(num_ranks, name) for num_ranks in FOR for name in FOR[num_ranks] if name in SETTINGS]
)
def test_only_stages_behind_something_to_train_run_backwards(num_ranks: int, name: str) -> None:
    by_rank, _ = results(num_ranks, name)
    assert [each["backwards"] for each in by_rank] == [[stages] * 2 for stages in SETTINGS[name][3]]


def test_a_step_follows_what_is_trained_now() -> None:
    by_rank, _ = results(2, "unfrozen later")
    first_rank, last_rank = (each["backwards"] for each in by_rank)
    assert first_rank == [set(), set(), {0}, {0}, set(), set()]
    assert last_rank == [{1}] * 6


def test_an_optimizer_with_nothing_on_a_stage_is_saved_as_by_one_device() -> None:
    by_rank, expected = results(2, "resumed")
    saved, wanted = by_rank[0]["optimizer"], expected["optimizer"]
    assert saved["param_groups"] == wanted["param_groups"]
    assert saved["state"].keys() == wanted["state"].keys()


def nothing_to_train(rank: int) -> str:
    with pytest.raises(ValueError, match="there is nothing to train: the loss of Frozen depends on no parameter"):
        fit(stages(2), Frozen(), rows(2), max_epochs=1)
    return "refused"


def test_a_module_with_nothing_to_train_is_refused_on_all_ranks() -> None:
    assert run_processes(nothing_to_train, 2) == ["refused"] * 2
