"""Whatever a training step does with the model and its loss has the effect it has on one device."""

import weakref

import pytest
import torch
from support.fitting import ONE_DEVICE, TWO_STAGES, difference, everywhere, fit, fitted_weights, rows, stages, weights
from support.training import FineTune
from torch import nn

TOLERANCE = 5e-6
CLIP = 0.2


class SGD(FineTune):
    """Plain gradient descent, whose steps show the gradients' size."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def automatic(where):
    return fitted_weights(where, SGD(), gradient_clip_val=CLIP)


class Manual(SGD):
    """The same steps by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.model(**batch).loss)
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        optimizer.step()


def manual(where):
    return fitted_weights(where, Manual())


class TwoOptimizers(Manual):
    """Optimizers for some layers each, stepped in turn; the gradients of the other one add up meanwhile."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        self.manual_backward(self.model(**batch).loss)
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self):
        early, late = nn.ModuleList(self.model.model.layers[:1]), self.model.lm_head
        rest = [p for p in self.parameters() if not any(p is q for q in (*early.parameters(), *late.parameters()))]
        return torch.optim.SGD(early.parameters(), lr=0.1), torch.optim.SGD([*rest, *late.parameters()], lr=0.05)


def two_optimizers(where):
    return fitted_weights(where, TwoOptimizers())


class OverriddenBackward(SGD):
    """Delivers the gradients by a backward of its own, three times as large."""

    def backward(self, loss, *args, **kwargs):
        (3 * loss).backward()


def overridden_backward(where):
    return fitted_weights(where, OverriddenBackward())


class TwoCalls(SGD):
    """Adds the losses of two batches, weighted."""

    def training_step(self, batch, batch_idx):
        halves = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
        first, second = (self.model(**half).loss for half in halves)
        return first + 0.3 * second


def two_calls(where):
    return fitted_weights(where, TwoCalls(), accumulate_grad_batches=2)


class LooksFirst(SGD):
    """Scales the loss by what the model gives without gradients, before and after."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            before = self.model(**batch).loss
        loss = self.model(**batch).loss
        with torch.no_grad():
            after = self.model(**batch).loss
        assert not before.requires_grad
        torch.testing.assert_close(before, loss.detach(), rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(before, after, rtol=0, atol=TOLERANCE)
        return loss * before


def looks_first(where):
    return fitted_weights(where, LooksFirst(), accumulate_grad_batches=2)


class ValidatesInInferenceMode(SGD):
    """What is first computed in inference mode must not enter the training."""

    def validation_step(self, batch, batch_idx):
        with torch.inference_mode():
            super().validation_step(batch, batch_idx)


def inference_mode(where):
    return weights(fit(where, ValidatesInInferenceMode(), rows(), rows(4, seed=2)))


class Recomputes(SGD):
    """Keeps no activations of its layers."""

    def configure_model(self):
        super().configure_model()
        self.model.gradient_checkpointing_enable()


def recomputed(where):
    return fitted_weights(where, Recomputes())


class WithParameterOfItsOwn(SGD):
    """Has a learned factor beside the language model, and a penalty on it."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.5]))

    def training_step(self, batch, batch_idx):
        return (self.model(**batch).loss * self.factor + 0.1 * self.factor.square()).squeeze()


def parameter_of_its_own(where):
    return fitted_weights(where, WithParameterOfItsOwn(), gradient_clip_val=CLIP)


class KeepsLosses(SGD):
    """Keeps every loss, and weak references to every gradient."""

    def __init__(self):
        super().__init__()
        self.losses, self.references, self.alive = [], [], []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.losses.append(loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.alive.append(sum(reference() is not None for reference in self.references))
        self.references = [weakref.ref(parameter.grad) for parameter in self.parameters()]


def kept_losses(where):
    module = KeepsLosses()
    fitted_weights(where, module)
    return module.alive, len(module.references)


class SecondBackward(Manual):
    """Asks for the gradients of one loss twice."""

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.manual_backward(loss, retain_graph=True)
        once = [parameter.grad.clone() for parameter in self.parameters()]
        with pytest.raises(
            RuntimeError, match=r"backward was called twice on one pipelined loss.*Call the model again"
        ):
            self.manual_backward(loss)
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(self.parameters(), once, strict=True))
        self.zero_grad()


def second_backward(where):
    return fitted_weights(where, SecondBackward(), max_epochs=1)


AS_ONE_DEVICE = (
    automatic,
    manual,
    two_optimizers,
    overridden_backward,
    two_calls,
    looks_first,
    inference_mode,
    recomputed,
    parameter_of_its_own,
)
ON_STAGES = (*AS_ONE_DEVICE, kept_losses, second_backward)


@pytest.mark.behaviour(5)
@pytest.mark.behaviour(25)
@pytest.mark.parametrize("case", AS_ONE_DEVICE)
def test_equals_one_device(case):
    expected = everywhere(AS_ONE_DEVICE, ONE_DEVICE)[case][0]
    assert difference(everywhere(ON_STAGES, TWO_STAGES)[case][0], expected) <= TOLERANCE


@pytest.mark.behaviour(25)
def test_manual_optimization_equals_automatic():
    by_hand = everywhere(ON_STAGES, TWO_STAGES)[manual][0]
    assert difference(by_hand, everywhere(ON_STAGES, TWO_STAGES)[automatic][0]) <= 1e-7


@pytest.mark.behaviour(25)
def test_a_kept_loss_keeps_no_gradient_alive():
    for alive, gradients in everywhere(ON_STAGES, TWO_STAGES)[kept_losses]:
        assert gradients > 0
        assert alive == [0] * 6


@pytest.mark.behaviour(25)
@pytest.mark.parametrize("where", [TWO_STAGES, stages(1)], ids=["two stages", "one stage"])
def test_a_second_backward_is_refused(where):
    cases = ON_STAGES if where == TWO_STAGES else (second_backward,)
    assert everywhere(cases, where)[second_backward]
