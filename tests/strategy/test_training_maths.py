"""Clipping, accumulation, arithmetic on the loss, step counts and odd batches give the weights of one device."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from support.fitting import ONE_DEVICE, TWO_STAGES, difference, everywhere, fit, fitted_weights, rows, stages, weights
from support.training import FineTune, Recorder
from torch.utils.data import DataLoader

TOLERANCE = 5e-6


class SGD(FineTune):
    """Plain gradient descent, whose steps show the gradients' size."""

    def __init__(self, factor=1.0, **options):
        super().__init__(**options)
        self.factor = factor

    def training_step(self, batch, batch_idx):
        return self.factor * self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def unclipped(where):
    return fitted_weights(where, SGD())


def clipped_by_norm(where):
    return fitted_weights(where, SGD(), gradient_clip_val=0.2)


def unclipped_when_tied(where):
    return fitted_weights(where, SGD(tie_word_embeddings=True))


def clipped_by_norm_when_tied(where):
    return fitted_weights(where, SGD(tie_word_embeddings=True), gradient_clip_val=0.2)


def clipped_by_value(where):
    return fitted_weights(where, SGD(), gradient_clip_val=1e-3, gradient_clip_algorithm="value")


def accumulated(where):
    return fitted_weights(where, SGD(), accumulate_grad_batches=2)


def accumulated_around_validation(where):
    module, val = SGD(), rows(2, seed=2)
    return weights(fit(where, module, rows(), val, accumulate_grad_batches=2, val_check_interval=1))


def accumulated_by_schedule(where):
    return fitted_weights(
        where, SGD(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})], max_epochs=3, gradient_clip_val=0.2
    )


def one_step(where, factor):
    return fitted_weights(where, SGD(factor), max_steps=1)


def whole_loss(where):
    return one_step(where, 1.0)


def half_loss(where):
    return one_step(where, 0.5)


class Scheduled(FineTune):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.01, total_steps=self.trainer.estimated_stepping_batches + 2
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StepRecorder(Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, *args):
        self.steps.append((trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]))


def steps(where):
    recorder = StepRecorder()
    trainer = fit(
        where, Scheduled(), rows(11), callbacks=[recorder], max_epochs=None, max_steps=5, accumulate_grad_batches=2
    )
    return recorder.steps, trainer.current_epoch, weights(trainer)


class OddBatches(torch.utils.data.Dataset):
    """Whole batches: rows, lengths and supervision differ from one to the next."""

    def __init__(self):
        shapes = [(3, 29), (1, 53), (4, 31), (2, 7)]
        self.batches = [next(iter(rows(count, count, length=length))) for count, length in shapes]
        for batch, first in zip(self.batches, (20, 52, 3, 5), strict=True):
            batch["labels"][0, :first] = -100  # supervision at the end of the first row only,
            batch["labels"][1:2] = -100  # and none in the second
            batch["labels"][0, -1] = batch["input_ids"][0, -1]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def odd_batches(where):
    recorder = Recorder()
    trainer = fit(where, FineTune(), DataLoader(OddBatches(), batch_size=None), callbacks=[recorder])
    return recorder.losses, weights(trainer)


def fewer_rows_than_microbatches(where):
    """The same in three microbatches, where a batch has as many rows."""
    return odd_batches(where if where == ONE_DEVICE else stages(where.devices, num_microbatches=3))


class Frozen(FineTune):
    """Trains only the parameters whose names contain one of some words."""

    def __init__(self, *trained):
        super().__init__()
        self.trained = trained

    def configure_model(self):
        super().configure_model()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(word in name for word in self.trained))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


LATE, EARLY = ("layers.3", "model.norm", "lm_head"), ("embed_tokens", "layers.0")


def first_stage_frozen(where):
    return fitted_weights(where, Frozen(*LATE), gradient_clip_val=0.2)


def last_stage_frozen(where):
    return fitted_weights(where, Frozen(*EARLY), gradient_clip_val=0.2)


def untrained(where):
    return fitted_weights(where, FineTune(), max_epochs=0)


CASES = (
    unclipped,
    unclipped_when_tied,
    clipped_by_norm,
    clipped_by_norm_when_tied,
    clipped_by_value,
    accumulated,
    accumulated_around_validation,
    accumulated_by_schedule,
    whole_loss,
    half_loss,
    steps,
    odd_batches,
    fewer_rows_than_microbatches,
    first_stage_frozen,
    last_stage_frozen,
    untrained,
)


def ours(case):
    return everywhere(CASES, TWO_STAGES)[case]


def truth(case):
    return everywhere(CASES, ONE_DEVICE)[case][0]


def assert_weights(case):
    assert difference(ours(case)[0], truth(case)) <= TOLERANCE


@pytest.mark.behaviour(2)
@pytest.mark.parametrize(
    ("case", "otherwise"),
    [
        (clipped_by_norm, unclipped),
        (clipped_by_norm_when_tied, unclipped_when_tied),
        (clipped_by_value, unclipped),
    ],
)
def test_clipping_equals_one_device(case, otherwise):
    assert_weights(case)
    assert difference(truth(case), truth(otherwise)) > 100 * TOLERANCE


@pytest.mark.behaviour(4)
@pytest.mark.parametrize("case", [accumulated, accumulated_around_validation, accumulated_by_schedule])
def test_accumulation_with_an_incomplete_last_window_equals_one_device(case):
    assert_weights(case)
    assert difference(truth(case), truth(unclipped)) > 100 * TOLERANCE


@pytest.mark.behaviour(5)
def test_half_the_loss_halves_the_update():
    before = truth(untrained)
    whole, half = ours(whole_loss)[0], ours(half_loss)[0]
    for name, start in before.items():
        torch.testing.assert_close(2 * (half[name] - start), whole[name] - start, rtol=0, atol=TOLERANCE)
    assert difference(whole, before) > 1e-3
    assert_weights(half_loss)


@pytest.mark.behaviour(6)
def test_global_step_learning_rates_and_max_steps_equal_one_device():
    expected_steps, expected_epoch, expected_weights = truth(steps)
    assert expected_steps[-1][0] == 5
    for recorded, epoch, _ in ours(steps):
        assert recorded == expected_steps
        assert epoch == expected_epoch
    assert difference(ours(steps)[0][2], expected_weights) <= TOLERANCE


@pytest.mark.behaviour(9)
@pytest.mark.behaviour(10)
@pytest.mark.parametrize("case", [odd_batches, fewer_rows_than_microbatches])
def test_batches_of_any_rows_lengths_and_supervision_equal_one_device(case):
    expected_losses, expected_weights = truth(case)
    for losses, _ in ours(case):
        assert losses == pytest.approx(expected_losses, abs=TOLERANCE)
    assert difference(ours(case)[0][1], expected_weights) <= TOLERANCE


@pytest.mark.behaviour(11)
@pytest.mark.parametrize(("case", "trained"), [(first_stage_frozen, LATE), (last_stage_frozen, EARLY)])
def test_a_fully_frozen_stage_trains_the_rest(case, trained):
    assert_weights(case)
    before, after = truth(untrained), ours(case)[0]
    for name, start in before.items():
        assert torch.equal(after[name], start) != any(word in name for word in trained), name
