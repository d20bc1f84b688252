"""Loss functions set on a model: those that add up over chunks are taken, all others refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.loss_training import smoothed
from support.tiny_models import tiny_model
from torch import Tensor

from lightning_seq1f1b.models.own_loss import check_loss_function
from lightning_seq1f1b.models.probe import probe


def targets_of(labels: Tensor, shift_labels: Tensor | None) -> Tensor:
    return F.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels


def mean_of_chunk(logits: Tensor, labels: Tensor, shift_labels: Tensor | None = None, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets_of(labels, shift_labels).flatten())


def shifts_again(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Tensor:
    return smoothed(logits, labels, vocab_size, num_items_in_batch)


def sum_of_tokens(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Any = None, **_: Any) -> Tensor:
    return smoothed(logits, labels, vocab_size, torch.tensor(1), shift_labels)


def needs_items(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Tensor:
    items = torch.tensor(1) if num_items_in_batch is None else num_items_in_batch
    return smoothed(logits, labels, vocab_size, items, shift_labels)


def of_each_token(logits: Tensor, labels: Tensor, shift_labels: Any = None, **_: Any) -> Tensor:
    return logits.logsumexp(-1)


def of_other_arguments(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.sum()


def test_a_function_that_adds_up_is_taken() -> None:
    model = tiny_model("llama")
    model.loss_function = smoothed
    probe(model)


def test_the_trial_leaves_the_random_state_alone() -> None:
    model = tiny_model("llama")

    def noisy(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        torch.rand(3)
        return smoothed(logits, labels, **kwargs)

    model.loss_function = noisy
    before = torch.get_rng_state()
    check_loss_function(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (mean_of_chunk, "does not add up over chunks: on random logits it gave"),
        (shifts_again, "does not add up over chunks"),
        (sum_of_tokens, "is not divided by num_items_in_batch"),
        (needs_items, "is not the mean over the supervised tokens where num_items_in_batch is None"),
        (of_each_token, r"TypeError: it returned a tensor of shape \[2, 7\], not a scalar tensor"),
        (of_other_arguments, "raised TypeError: .* unexpected keyword argument"),
    ],
)
def test_other_functions_are_refused_with_the_reason(function: Callable[..., Tensor], reason: str) -> None:
    model = tiny_model("llama")
    model.loss_function = function
    with pytest.raises(ValueError, match=f"loss_function of LlamaForCausalLM, {function.__name__},.*{reason}"):
        probe(model)
