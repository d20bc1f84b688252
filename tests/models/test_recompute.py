"""Activation recomputation, switched on as users of transformers do, is exact."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.float64 import float64_throughout
from support.staged_run import Result, largest_difference, make_stages, run_stages, run_whole
from support.tiny_models import tiny_batch, tiny_model
from transformers import PreTrainedModel

from lightning_seq1f1b.models.stage import HuggingFaceStage


def enable(model: PreTrainedModel, **options: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):  # the name from transformers 5.24 on
        model.activation_checkpointing_enable(**options)
    else:
        model.gradient_checkpointing_enable(**options)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen3_next", "falcon"])
@pytest.mark.parametrize(("num_ranks", "split"), [(3, False), (1, True)])
def test_it_is_exact(family: str, num_ranks: int, split: bool) -> None:
    model, batch = tiny_model(family), tiny_batch()
    with float64_throughout():
        truth = run_whole(model, batch)
        enable(model)
        stages = make_stages(model, num_ranks=num_ranks)
        assert largest_difference(run_stages(stages, batch, split=split), truth) < 1e-10
    assert not any(getattr(m, "gradient_checkpointing", False) for stage in stages for m in stage.model.modules())


def count_runs(stages: list[HuggingFaceStage]) -> Counter[int]:
    """How often the MLP of each layer has run, counted from now on."""
    counts: Counter[int] = Counter()
    for stage in stages:
        for index in stage.layers:
            mlp = stage.model.model.layers[index].mlp
            mlp.register_forward_pre_hook(lambda *_, index=index: counts.update([index]))
    return counts


def test_layers_run_twice_when_it_is_on_and_once_when_not() -> None:
    model, batch = tiny_model("llama"), tiny_batch()
    stages = make_stages(model)
    counts = count_runs(stages)
    run_stages(stages, batch)
    assert counts == {0: 5, 1: 5, 2: 5, 3: 5}
    # Switched on after the cut, on one stage: it is noticed before the next microbatch.
    enable(stages[1].model)
    run_stages(stages, batch)
    assert counts == {0: 10, 1: 15, 2: 15, 3: 10}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_layers_can_be_chosen(num_ranks: int) -> None:
    model, batch = tiny_model("llama"), tiny_batch()
    enable(model)
    model.model.layers[2].gradient_checkpointing = False
    stages = make_stages(model, num_ranks=num_ranks)
    counts = count_runs(stages)
    run_stages(stages, batch)
    assert counts == {0: 10, 1: 10, 2: 5, 3: 10}


def test_without_training_nothing_is_recomputed() -> None:
    model, batch = tiny_model("llama"), tiny_batch()
    enable(model)
    model.eval()
    stages = make_stages(model)
    counts = count_runs(stages)
    run_stages(stages, batch)
    assert counts == {0: 5, 1: 5, 2: 5, 3: 5}


def test_dropout_draws_the_same_again() -> None:
    """Under one seed, gradients with recomputation equal those without."""
    results: list[Result] = []
    for recompute in (False, True):
        model = tiny_model("gpt2", attn_pdrop=0.2, resid_pdrop=0.1)
        if recompute:
            enable(model)
        stages = make_stages(model, [range(4)])
        with float64_throughout():
            torch.manual_seed(3)
            results.append(run_stages(stages, tiny_batch()))
    assert largest_difference(results[1], results[0]) < 1e-12
