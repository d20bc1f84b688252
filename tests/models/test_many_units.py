"""Gradients of bfloat16 models, summed over many chunks and microbatches, against those of the model in float64."""

from __future__ import annotations

import functools

import pytest
import torch
from support.staged_run import Result, make_stages, run_stages, run_whole
from support.tiny_models import tiny_batch, tiny_model

from lightning_seq1f1b.runtime.wide_gradients import WideGradients

LENGTH, CHUNKS, MICROBATCHES = 128, 16, 8


@functools.cache
def errors() -> dict[str, float]:
    """Of the gradients of one device, and of 128 units summed in float32 and in bfloat16, with both backwards."""
    model = tiny_model("llama", torch.float32).to(torch.bfloat16)
    batch = tiny_batch(MICROBATCHES, LENGTH)
    truth = run_whole(tiny_model("llama", torch.float32).to(torch.bfloat16).double(), batch)

    def error(result: Result) -> float:
        apart = [result.gradients[name].double() - wanted for name, wanted in truth.gradients.items()]
        return float(torch.cat([each.flatten() for each in apart]).norm())

    found = {"one device": error(run_whole(model, batch))}
    for split in (False, True):
        for wide in (False, True):
            stages = make_stages(model, [range(4)])
            if wide:
                WideGradients(parameter for stage in stages for parameter in stage.model.parameters()).begin()
            result = run_stages(stages, batch, [LENGTH // CHUNKS] * CHUNKS, MICROBATCHES, split=split)
            dtypes = {gradient.dtype for gradient in result.gradients.values()}
            assert dtypes == {torch.float32 if wide else torch.bfloat16}
            rounded = {name: gradient.bfloat16() for name, gradient in result.gradients.items()}
            name = f"{'split' if split else 'whole'} backward, {'float32' if wide else 'bfloat16'} sums"
            found[name] = error(Result(result.loss, rounded))
    return found


@pytest.mark.parametrize("backward", ["split", "whole"])
def test_many_units_lose_no_more_than_one_device(backward: str) -> None:
    assert errors()[f"{backward} backward, float32 sums"] <= 1.25 * errors()["one device"]


@pytest.mark.parametrize("backward", ["split", "whole"])
def test_sums_in_bfloat16_would_lose_more(backward: str) -> None:
    # Not so for one product over all tokens, which sums in float32.
    assert errors()[f"{backward} backward, bfloat16 sums"] > 1.5 * errors()[f"{backward} backward, float32 sums"]
