"""bfloat16 runs stay as near to the float32 run as one device's bfloat16 run does."""

import pytest
import torch
from support.fitting import ONE_DEVICE, everywhere, fit, rows, stages, weights
from support.training import FineTune

FIVE_CHUNKS = stages(num_chunks=5)


class LossKeeper(FineTune):
    """Keeps the losses that the user's code saw and logged."""

    def __init__(self):
        super().__init__()
        self.losses, self.dtypes = [], set()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.dtypes |= {loss.dtype, self.trainer.callback_metrics["train_loss"].dtype}
        self.losses.append(float(loss))
        return loss


def run(where, precision):
    module = LossKeeper()
    trainer = fit(where, module, rows(), precision=precision, gradient_clip_val=0.5, accumulate_grad_batches=2)
    return torch.tensor(module.losses, dtype=torch.float64), weights(trainer), module.dtypes


def distance(got, expected):
    """The 2-norm of the difference between two sets of weights."""
    return sum((got[name].double() - expected[name].double()).square().sum() for name in expected).sqrt()


def full(where):
    return run(where, "32-true")


def mixed(where):
    return run(where, "bf16-mixed")


def half(where):
    return run(where, "bf16-true")


CASES = (mixed, half)


@pytest.mark.behaviour(8)
@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_float32(case):
    for _, _, dtypes in everywhere(CASES, FIVE_CHUNKS)[case]:
        assert dtypes == {torch.float32}


@pytest.mark.behaviour(8)
@pytest.mark.parametrize("case", CASES)
def test_rounding_is_that_of_one_device(case):
    exact_losses, exact_weights, _ = everywhere((full,), ONE_DEVICE)[full][0]
    own_losses, own_weights, _ = everywhere(CASES, ONE_DEVICE)[case][0]
    by_rank = everywhere(CASES, FIVE_CHUNKS)[case]
    own = (own_losses - exact_losses).norm(), distance(own_weights, exact_weights)
    assert min(own) > 0
    ours = (by_rank[0][0] - exact_losses).norm(), distance(by_rank[0][1], exact_weights)
    for mine, theirs in zip(ours, own, strict=True):
        assert mine <= 2 * theirs
    for losses, _, _ in by_rank:
        assert torch.equal(losses, by_rank[0][0])
