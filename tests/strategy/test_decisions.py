"""Checkpointing, early stopping and learning rates that follow a metric decide alike on all ranks, as on one device."""

import tempfile
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from support.fitting import ONE_DEVICE, TWO_STAGES, everywhere, fit, rows
from support.processes import run_processes
from support.training import FineTune

TOLERANCE = 5e-6
FACTORS = (1.0, 0.5, 2.0, 0.3, 0.7, 0.2)
"""Of the validation loss, by epoch: a metric that goes up and down."""


class Scored(FineTune):
    """Logs a score that goes up and down; the learning rate follows it."""

    def __init__(self, factors=FACTORS):
        super().__init__()
        self.factors = factors

    def validation_step(self, batch, batch_idx):
        self.log("score", self.model(**batch).loss * self.factors[self.current_epoch])

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "score"}}


class EpochRecorder(Callback):
    def __init__(self):
        self.rates = []

    def on_train_epoch_end(self, trainer, *args):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def run(where, *callbacks, factors=FACTORS, **options):
    """Six epochs, unless a callback ends them."""
    recorder = EpochRecorder()
    options = {"max_epochs": len(FACTORS), "num_sanity_val_steps": 0, **options}
    trainer = fit(where, Scored(factors), rows(4), rows(3, seed=2), callbacks=[*callbacks, recorder], **options)
    return {"rates": recorder.rates, "epoch": trainer.current_epoch, "steps": trainer.global_step}


def followed(where):
    return run(where)


def stopped(where):
    return run(where, EarlyStopping("score", patience=1, min_delta=10.0))


def stopped_by_nan(where):
    return run(where, EarlyStopping("score", patience=9, check_finite=True), factors=(1.0, 0.5, float("nan"), 1, 1, 1))


def checkpointed(where):
    """Every rank asks for a folder of its own; rank 0's is used."""
    with tempfile.TemporaryDirectory() as folder:
        best = ModelCheckpoint(folder, "{epoch}", monitor="score", save_top_k=2, save_last=True)
        result = run(where, best, enable_checkpointing=True)
        files = sorted(path.name for path in Path(folder).iterdir())
    return result, {
        "folder": best.dirpath,
        "best": Path(best.best_model_path).name,
        "score": float(best.best_model_score),
        "kept": {Path(path).name: float(score) for path, score in best.best_k_models.items()},
        "last": Path(best.last_model_path).name,
    }, files  # fmt: skip


CASES = (followed, stopped, stopped_by_nan, checkpointed)


@pytest.mark.behaviour(20)
def test_the_true_best_checkpoints_are_kept():
    expected, expected_best, expected_files = everywhere(CASES, ONE_DEVICE)[checkpointed][0]
    (first, best, files), (second, other_best, other_files) = everywhere(CASES, TWO_STAGES)[checkpointed]
    assert first == second == expected
    assert expected_best["best"] == "epoch=5.ckpt"
    assert files == expected_files == ["epoch=3.ckpt", "epoch=5.ckpt", "last.ckpt"]
    assert other_files == []
    assert best == other_best
    for name in ("best", "last"):
        assert best[name] == expected_best[name]
    assert best["score"] == pytest.approx(expected_best["score"], abs=TOLERANCE)
    assert best["kept"] == pytest.approx(expected_best["kept"], abs=TOLERANCE)


@pytest.mark.behaviour(21)
@pytest.mark.parametrize("case", [stopped, stopped_by_nan])
def test_early_stopping_stops_all_ranks_at_one_step(case):
    expected = everywhere(CASES, ONE_DEVICE)[case][0]
    assert 0 < expected["epoch"] < len(FACTORS)
    assert everywhere(CASES, TWO_STAGES)[case] == [expected] * 2


@pytest.mark.behaviour(22)
def test_a_plateau_lowers_the_rate_equally_on_all_stages():
    expected = everywhere(CASES, ONE_DEVICE)[followed][0]
    assert len(set(expected["rates"])) > 2
    assert everywhere(CASES, TWO_STAGES)[followed] == [expected] * 2


def validated_by_the_clock(rank):
    with pytest.raises(ValueError, match="a time as val_check_interval") as caught:
        run(TWO_STAGES, val_check_interval="00:01:00:00")
    return str(caught.value)


def test_validation_by_each_process_own_clock_is_refused():
    assert all("give a number of batches" in message for message in run_processes(validated_by_the_clock, 2))
