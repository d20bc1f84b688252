"""Rotary embeddings that depend on the row's length see the row's end from every chunk."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.float64 import float64_throughout
from support.staged_run import largest_difference, make_stages, run_stages, run_whole
from support.tiny_models import tiny_batch, tiny_model
from transformers import PreTrainedModel

from lightning_seq1f1b.models import rotary
from lightning_seq1f1b.models.rotary import RowEnd

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
    "factor": 32.0,
}


def dynamic() -> PreTrainedModel:
    return tiny_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=16)


def long() -> PreTrainedModel:
    return tiny_model("phi3", rope_parameters=LONG, original_max_position_embeddings=16)


def compare(model: PreTrainedModel, length: int, chunk_lengths: tuple[int, ...], num_ranks: int = 3) -> float:
    batch = tiny_batch(length=length)
    stages = make_stages(model, num_ranks=num_ranks)
    with float64_throughout():
        return largest_difference(run_stages(stages, batch, chunk_lengths), run_whole(model, batch))


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("make", [dynamic, long])
def test_chunks_equal_the_whole(make: Callable[[], PreTrainedModel], num_ranks: int) -> None:
    assert compare(make(), 48, (7, 13, 2, 15, 11), num_ranks) < 1e-10


@pytest.mark.parametrize("make", [dynamic, long])
def test_without_it_they_would_not(make: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "length_dependent", lambda _: ())
    assert compare(make(), 48, (7, 13, 2, 15, 11)) > 1e-3


def test_rows_short_enough_keep_their_frequencies() -> None:
    assert compare(long(), 12, (5, 7)) < 1e-10


def test_other_rotary_embeddings_are_left_alone() -> None:
    model = tiny_model("llama")
    RowEnd(model)
    assert not model.model.rotary_emb._forward_hooks
    assert torch.is_tensor(model.model.rotary_emb.inv_freq)
