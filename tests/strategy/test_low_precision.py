"""Low-precision runs stay as near to the float32 run as one device's do; a scaled loss has one scale everywhere."""

import os
import tempfile
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from support.fitting import ONE_DEVICE, TWO_BY_TWO, difference, everywhere, fit, rows, stages, weights
from support.training import FineTune

from lightning_seq1f1b import chunked_loss

FIVE_CHUNKS = stages(num_chunks=5)
SCALE = 2.0**12


class LossKeeper(FineTune):
    """Keeps the losses that the user's code saw and logged."""

    def __init__(self):
        super().__init__()
        self.losses, self.dtypes = [], set()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.dtypes |= {loss.dtype, self.trainer.callback_metrics["train_loss"].dtype}
        self.losses.append(float(loss.detach()))
        return loss


class Descending(LossKeeper):
    """With an optimizer whose step does not vanish or blow up in float16."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


def run(where, precision, module=LossKeeper, **options):
    module = module()
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, **options}
    trainer = fit(where, module, rows(), precision=precision, **options)
    return torch.tensor(module.losses, dtype=torch.float64), weights(trainer), module.dtypes


def distance(got, expected):
    """The 2-norm of the difference between two sets of weights."""
    return sum((got[name].double() - expected[name].double()).square().sum() for name in expected).sqrt()


def full(where):
    return run(where, "32-true")


def full_descending(where):
    return run(where, "32-true", Descending)


def mixed(where):
    return run(where, "bf16-mixed")


def half(where):
    return run(where, "bf16-true")


def seen_dtypes(where):
    """What the user's hooks see of bfloat16 gradients that were summed in float32, also where batches add up."""
    seen = set()

    class Watched(FineTune):
        def on_after_backward(self):
            for parameter in self.parameters():
                seen.update({parameter.grad.dtype, parameter.grad_dtype})

    fit(where, Watched(), rows(), precision="bf16-true", max_epochs=1, accumulate_grad_batches=2)
    return seen


def float16(where):
    return run(where, "16-true", Descending)


# ---- one loss scale ------------------------------------------------------------------------------------------------


class Tripled(LossKeeper):
    """What the user makes of the loss counts, scaled or not."""

    def training_step(self, batch, batch_idx):
        return 3 * super().training_step(batch, batch_idx)


class TopFrozen(LossKeeper):
    """The last stage has nothing to train."""

    def configure_optimizers(self):
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("embed_tokens" in name)
        return super().configure_optimizers()


class Fused(LossKeeper):
    """With an optimizer that unscales gradients itself."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, fused=True)


class Manual(LossKeeper):
    """The user's code steps."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5)
        optimizer.step()


class Minute(LossKeeper):
    """A loss so small that float16 gradients of its logits are zero unless it is scaled before its backward."""

    def training_step(self, batch, batch_idx):
        def small(logits, labels, num_items_in_batch):
            logits = logits.float().flatten(0, 1)
            return (
                1e-7 * torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch
            )

        loss = chunked_loss(self.model, batch, small).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=3e6)


class Spoiled(Callback):
    """Puts an infinity into the gradient of one layer, in one step; the others are not told."""

    def __init__(self, layer, step):
        self.name, self.step, self.scales, self.same = f"layers.{layer}.mlp.up_proj", step, [], None

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == self.step:
            for name, parameter in pl_module.named_parameters():
                if self.name in name:
                    parameter.grad[0, 0] = torch.inf
            self.before = {name: parameter.detach().clone() for name, parameter in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == self.step + 1 and self.same is None:
            self.same = all(torch.equal(self.before[name], p) for name, p in pl_module.named_parameters())
        self.scales.append(trainer.precision_plugin.scaler.get_scale())


def scaled(where, module=LossKeeper, scale=SCALE, **options):
    """The losses, weights and scaler of a run with loss scaling; by its name alone it would be bf16-mixed on CPUs."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, **options}
    module = module()
    trainer = fit(where, module, rows(), plugins=plugins, **options)
    return module.losses, weights(trainer), scaler.state_dict()


def plainly_scaled(where):
    return scaled(where)


def tripled(where):
    return scaled(where, Tripled)


def top_frozen(where):
    return scaled(where, TopFrozen)


def manual(where):
    return scaled(where, Manual, gradient_clip_val=None, accumulate_grad_batches=1)


def minute(where):
    return scaled(where, Minute, scale=2.0**20, gradient_clip_val=None)


def spoiled(where, module=LossKeeper, layer=3, **options):
    spoiler = Spoiled(layer, step=1)
    result = scaled(where, module, callbacks=[spoiler], accumulate_grad_batches=1, **options)
    return *result, spoiler.scales, spoiler.same


def spoiled_below(where):
    return spoiled(where, layer=0)


def spoiled_sharded(where):
    return spoiled(replace(where, strategy=(*where.strategy, ("shard_optimizer", True))))


def spoiled_fused(where):
    return spoiled(where, Fused, gradient_clip_val=None)


def overflowing(where):
    """The loss itself can be multiplied by so much, float16 gradients of activations cannot."""
    return scaled(where, scale=2.0**60, max_epochs=1, accumulate_grad_batches=1)


def resumed(where):
    """Half of the run, then the rest by another Trainer with a scaler of its own."""
    first = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    trainer = fit(where, FineTune(), rows(), plugins=[MixedPrecision("16-mixed", "cpu", scaler=first)], max_epochs=1)
    path = os.path.join(trainer.strategy.broadcast(tempfile.mkdtemp()), "half.ckpt")
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["MixedPrecision"]
    again = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=7)
    module, plugins = FineTune(), [MixedPrecision("16-mixed", "cpu", scaler=again)]
    trainer = fit(where, module, rows(), plugins=plugins, ckpt_path=path)
    return saved, weights(trainer), again.state_dict()


# ---- buffers -------------------------------------------------------------------------------------------------------


class InferenceFirst(LossKeeper):
    """Evaluates in inference mode, as Lightning does with NCCL, before the first step and between steps."""

    def training_step(self, batch, batch_idx):
        with torch.inference_mode():
            self.evaluated = float(self.model(**batch).loss)
            self.model.generate(batch["input_ids"][:, :5], max_new_tokens=2, do_sample=False, pad_token_id=0)
        loss = super().training_step(batch, batch_idx)
        assert abs(self.evaluated - float(loss.detach())) < 1e-6
        return loss


def after_inference(where):
    return run(where, "32-true", InferenceFirst)


ROUNDED = {mixed: full, half: full, float16: full_descending}
"""Runs in low precision, and the float32 runs they are near to."""
SCALED = (plainly_scaled, tripled, top_frozen, manual, minute)
SPOILED = (spoiled, spoiled_below, spoiled_fused)
CASES = (*ROUNDED, *SCALED, *SPOILED, overflowing, resumed, after_inference, seen_dtypes)


@pytest.mark.behaviour(8)
@pytest.mark.parametrize("case", ROUNDED)
def test_the_loss_is_float32(case):
    for _, _, dtypes in everywhere(CASES, FIVE_CHUNKS)[case]:
        assert dtypes == {torch.float32}


@pytest.mark.behaviour(8)
@pytest.mark.parametrize("case", ROUNDED)
def test_rounding_is_that_of_one_device(case):
    exact_losses, exact_weights, _ = everywhere((ROUNDED[case],), ONE_DEVICE)[ROUNDED[case]][0]
    own_losses, own_weights, _ = everywhere(CASES, ONE_DEVICE)[case][0]
    by_rank = everywhere(CASES, FIVE_CHUNKS)[case]
    own = (own_losses - exact_losses).norm(), distance(own_weights, exact_weights)
    assert min(own) > 0
    ours = (by_rank[0][0] - exact_losses).norm(), distance(by_rank[0][1], exact_weights)
    for mine, theirs in zip(ours, own, strict=True):
        assert mine <= 2 * theirs
    for losses, _, _ in by_rank:
        assert torch.equal(losses, by_rank[0][0])


@pytest.mark.behaviour(7)
@pytest.mark.parametrize("case", SCALED)
def test_a_scaled_loss_trains_as_on_one_device(case):
    """Accumulated, clipped, with factors of the user's, by hand, and with a loss that float16 needs a scale for."""
    losses, expected, scaler = everywhere(CASES, ONE_DEVICE)[case][0]
    assert scaler["scale"] > SCALE  # has grown
    for own_losses, own_weights, own_scaler in everywhere(CASES, FIVE_CHUNKS)[case]:
        assert own_scaler == scaler
        torch.testing.assert_close(own_losses, losses, rtol=1e-3, atol=0)
        if own_weights:
            assert difference(own_weights, expected) < 1e-3


@pytest.mark.behaviour(7)
@pytest.mark.parametrize("case", SPOILED)
def test_an_infinity_on_one_stage_skips_the_step_on_all(case):
    losses, expected, scaler, scales, _ = everywhere(CASES, ONE_DEVICE)[case][0]
    assert scales[:2] == [SCALE, SCALE / 2]
    for own_losses, own_weights, own_scaler, own_scales, same in everywhere(CASES, FIVE_CHUNKS)[case]:
        assert same
        assert (own_scaler, own_scales) == (scaler, scales)
        torch.testing.assert_close(own_losses, losses, rtol=1e-3, atol=0)
        if own_weights:
            assert difference(own_weights, expected) < 1e-3


@pytest.mark.behaviour(7)
@pytest.mark.behaviour(3)
def test_an_infinity_in_one_replica_skips_the_step_in_all():
    cases = (spoiled, spoiled_below, spoiled_sharded)
    for case in cases:
        for _, _, scaler, scales, same in everywhere(cases, TWO_BY_TWO)[case]:
            assert same
            assert scales[:2] == [SCALE, SCALE / 2]
            assert scaler == everywhere(cases, TWO_BY_TWO)[case][0][2]


@pytest.mark.behaviour(7)
def test_the_scale_acts_inside_the_step():
    """Gradients of activations overflow, as on one device: scaling what the step has computed would not."""
    [_, one_device, expected] = everywhere(CASES, ONE_DEVICE)[overflowing][0]
    assert expected["scale"] < 2.0**60
    for _, own_weights, scaler in everywhere(CASES, FIVE_CHUNKS)[overflowing]:
        assert scaler == expected
        if own_weights:
            assert difference(own_weights, one_device) == 0.0


@pytest.mark.behaviour(34)
def test_the_scaler_resumes():
    saved, expected, scaler = everywhere(CASES, ONE_DEVICE)[resumed][0]
    assert saved["scale"] > SCALE
    for own_saved, own_weights, own_scaler in everywhere(CASES, FIVE_CHUNKS)[resumed]:
        assert (own_saved, own_scaler) == (saved, scaler)
        if own_weights:
            assert difference(own_weights, expected) < 1e-3


@pytest.mark.behaviour(50)
def test_inference_mode_leaves_nothing_that_training_cannot_use():
    exact = everywhere((full,), ONE_DEVICE)[full][0]
    for losses, own_weights, _ in everywhere(CASES, FIVE_CHUNKS)[after_inference]:
        torch.testing.assert_close(losses, exact[0], rtol=0, atol=1e-6)
        if own_weights:
            assert difference(own_weights, exact[1]) < 5e-6


def test_gradients_have_their_parameters_dtype():
    assert everywhere(CASES, FIVE_CHUNKS)[seen_dtypes] == [{torch.bfloat16}] * 2
