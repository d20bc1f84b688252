"""Hooks fire in the order of one device, on all ranks, and see its gradients."""

import pytest
from lightning.pytorch.callbacks import Callback
from support.fitting import ONE_DEVICE, TWO_STAGES, everywhere, fit, rows
from support.training import FineTune

HOOKS = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)


class Calls:
    """Writes down which hook was called, and the sum of squares of the gradients it could see on this rank."""

    def __init__(self):
        self.hooks, self.gradients = [], []

    def add(self, source, hook, module):
        self.hooks.append((source, hook))
        present = [parameter.grad.square().sum() for parameter in module.parameters() if parameter.grad is not None]
        self.gradients.append(float(sum(present)))


class Watching(FineTune):
    """Reports every hook of one batch; those that only an overridden method can report, too."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def training_step(self, batch, batch_idx):
        self.calls.add("module", "training_step", self)
        return super().training_step(batch, batch_idx)

    def backward(self, loss, *args, **kwargs):
        self.calls.add("module", "backward", self)
        super().backward(loss, *args, **kwargs)

    def configure_gradient_clipping(self, *args, **kwargs):
        self.calls.add("module", "configure_gradient_clipping", self)
        super().configure_gradient_clipping(*args, **kwargs)
        self.calls.add("module", "clipped", self)

    def optimizer_step(self, *args, **kwargs):
        self.calls.add("module", "optimizer_step", self)
        super().optimizer_step(*args, **kwargs)


class WatchingZeroGrad(Watching):
    """Also reports zeroing, before which the gradients of the step before must still be there."""

    def on_before_zero_grad(self, optimizer):
        self.calls.add("module", "on_before_zero_grad", self)

    def optimizer_zero_grad(self, *args):
        self.calls.add("module", "optimizer_zero_grad", self)
        super().optimizer_zero_grad(*args)


class WatchingCallback(Callback):
    def __init__(self, calls):
        self.calls = calls


class WatchingZeroGradCallback(WatchingCallback):
    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.calls.add("callback", "on_before_zero_grad", pl_module)


def _report(hook):
    def of_module(self, *args):
        self.calls.add("module", hook, self)

    def of_callback(self, trainer, pl_module, *args):
        self.calls.add("callback", hook, pl_module)

    setattr(Watching, hook, of_module)
    setattr(WatchingCallback, hook, of_callback)


for _hook in HOOKS:
    _report(_hook)


def run(where, module, callback, **options):
    calls = Calls()
    fit(
        where,
        module(calls),
        rows(),
        callbacks=[callback(calls)],
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        **options,
    )
    return calls.hooks, calls.gradients


def plain(where):
    return run(where, Watching, WatchingCallback)


def module_watches_zeroing(where):
    return run(where, WatchingZeroGrad, WatchingCallback)


def callback_watches_zeroing(where):
    return run(where, Watching, WatchingZeroGradCallback)


class UsesTheModelInHooks(Watching):
    """Calls the model outside of training_step, without asking for gradients, but with autograd on."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.model(**batch)
        self.calls.add("module", "on_train_batch_end", self)


def model_used_in_hooks(where):
    return run(where, UsesTheModelInHooks, WatchingCallback)


CASES = (plain, module_watches_zeroing, callback_watches_zeroing, model_used_in_hooks)


@pytest.mark.behaviour(25)
@pytest.mark.parametrize("case", CASES)
def test_hooks_fire_in_the_order_of_one_device(case):
    expected, _ = everywhere(CASES, ONE_DEVICE)[case][0]
    assert ("callback", "on_after_backward") in expected
    assert ("module", "backward") in expected
    for hooks, _ in everywhere(CASES, TWO_STAGES)[case]:
        assert hooks == expected


@pytest.mark.behaviour(25)
@pytest.mark.parametrize("case", CASES)
def test_hooks_see_the_gradients_of_one_device(case):
    hooks, expected = everywhere(CASES, ONE_DEVICE)[case][0]
    by_rank = [gradients for _, gradients in everywhere(CASES, TWO_STAGES)[case]]
    for (_, hook), whole, *parts in zip(hooks, expected, *by_rank, strict=True):
        assert sum(parts) == pytest.approx(whole, rel=1e-4), hook
    seen = dict(zip([hook for _, hook in hooks], expected, strict=True))  # the last batch begins a window of its own
    assert seen["on_before_backward"] == seen["backward"] == 0 < seen["on_after_backward"]
    assert seen["clipped"] < seen["configure_gradient_clipping"]
