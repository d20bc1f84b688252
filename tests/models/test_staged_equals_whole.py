"""A model cut into stages and run in chunks gives the loss and the gradients of the whole model, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.float64 import float64_throughout
from support.staged_run import (
    Result,
    largest_difference,
    make_stages,
    run_stages,
    run_whole,
)
from support.tiny_models import tiny_batch, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from lightning_seq1f1b.runtime.kv_buffer import KVBuffer

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2")
TOLERANCE = 1e-10
TWO_ON_A_RANK = {
    1: (range(2), range(2, 6)),
    2: (range(1), range(1, 3), range(3, 5), range(5, 6)),
    3: tuple(range(layer, layer + 1) for layer in range(6)),
}
"""Layer ranges of a model of six layers, by the number of ranks."""


def compare(model: PreTrainedModel, batch: dict[str, Tensor], whole_batch: dict[str, Tensor] | None = None) -> float:
    with float64_throughout():
        truth = run_whole(model, batch if whole_batch is None else whole_batch)
        return largest_difference(run_stages(make_stages(model), batch), truth)


def six_layers(family: str, **overrides: Any) -> PreTrainedModel:
    return tiny_model(family, num_hidden_layers=6, **overrides)


def right_padded() -> dict[str, Tensor]:
    batch = tiny_batch()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 30:] = 0
    mask[1, 41:] = 0
    return {**batch, "labels": batch["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}


def left_padded() -> dict[str, Tensor]:
    batch = tiny_batch()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :9] = 0
    mask[1, :22] = 0
    first_real = (mask.cumsum(dim=1) == 1) & (mask == 1)
    labels = batch["labels"].masked_fill((mask == 0) | first_real, -100)
    position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return {**batch, "labels": labels, "attention_mask": mask, "position_ids": position_ids}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal(family: str, tied: bool) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert compare(model, tiny_batch()) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_right_padding_with_a_mask(family: str) -> None:
    assert compare(tiny_model(family), right_padded()) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_right_padding_without_a_mask_where_no_padding_is_supervised(family: str) -> None:
    batch = right_padded()
    without = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    assert compare(tiny_model(family), without, whole_batch=batch) < TOLERANCE


def test_right_padding_that_is_supervised_keeps_its_mask() -> None:
    batch = {**right_padded(), "labels": tiny_batch(ignored=0.0)["labels"]}
    assert compare(tiny_model("llama"), batch) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding(family: str) -> None:
    assert compare(tiny_model(family), left_padded()) < TOLERANCE


def test_microbatches_add_up() -> None:
    model, batch = tiny_model("llama"), tiny_batch(rows=3)
    with float64_throughout():
        staged = run_stages(make_stages(model), batch, num_microbatches=2)
        assert largest_difference(staged, run_whole(model, batch)) < TOLERANCE


@pytest.mark.parametrize("lengths", [(48,), (1, 46, 1), (12, 12, 12, 12)], ids=str)
@pytest.mark.parametrize("layer_ranges", [(range(4),), (range(3), range(3, 4))], ids=["one stage", "two stages"])
def test_any_chunks_and_stages(layer_ranges: tuple[range, ...], lengths: tuple[int, ...]) -> None:
    model, batch = tiny_model("qwen3", tie_word_embeddings=True), tiny_batch()
    with float64_throughout():
        staged = run_stages(make_stages(model, layer_ranges), batch, lengths)
        assert largest_difference(staged, run_whole(model, batch)) < TOLERANCE


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_on_a_rank(family: str, num_ranks: int) -> None:
    model, batch = six_layers(family, tie_word_embeddings=True), left_padded()
    with float64_throughout():
        stages = make_stages(model, TWO_ON_A_RANK[num_ranks], num_ranks)
        assert len({id(stage.model) for stage in stages}) == num_ranks
        assert largest_difference(run_stages(stages, batch), run_whole(model, batch)) < TOLERANCE


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_two_stages_on_a_rank_without_tied_embeddings(num_ranks: int) -> None:
    model, batch = six_layers("llama"), tiny_batch()
    with float64_throughout():
        staged = run_stages(make_stages(model, TWO_ON_A_RANK[num_ranks], num_ranks), batch, num_microbatches=2)
        assert largest_difference(staged, run_whole(model, batch)) < TOLERANCE


def test_a_stage_for_every_layer_on_one_rank() -> None:
    model, batch = tiny_model("gpt2"), tiny_batch()
    with float64_throughout():
        staged = run_stages(make_stages(model, [range(index, index + 1) for index in range(4)], 1), batch)
        assert largest_difference(staged, run_whole(model, batch)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_split_backward(family: str) -> None:
    model, batch = tiny_model(family, tie_word_embeddings=True), right_padded()
    with float64_throughout():
        staged = run_stages(make_stages(model, num_ranks=2), batch, num_microbatches=2, split=True)
        assert largest_difference(staged, run_whole(model, batch)) < TOLERANCE


def test_without_the_gradients_of_keys_and_values_it_would_not_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = KVBuffer._accumulator
    monkeypatch.setattr(KVBuffer, "_accumulator", lambda self, slot: accumulator(self, slot).clone())
    assert compare(tiny_model("llama"), tiny_batch()) > 1e-2


def test_float32_is_equal_to_rounding() -> None:
    model, batch = tiny_model("llama", torch.float32), tiny_batch()
    assert largest_difference(run_stages(make_stages(model), batch), run_whole(model, batch)) < 1e-5


def test_bfloat16_autocast_is_as_close_to_float32_as_one_device() -> None:
    model, batch = tiny_model("llama", torch.float32), tiny_batch()
    truth = run_whole(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        whole = run_whole(model, batch)
        staged = run_stages(make_stages(model), batch)
    assert error(staged, truth) < 1.2 * error(whole, truth)


def test_bfloat16_weights_are_as_close_to_float32_as_one_device() -> None:
    model, batch = tiny_model("llama", torch.float32), tiny_batch()
    truth = run_whole(model, batch)
    half = tiny_model("llama", torch.float32).to(torch.bfloat16)
    whole, staged = run_whole(half, batch), run_stages(make_stages(half), batch)
    assert error(staged, truth) < 1.2 * error(whole, truth)


def error(result: Result, truth: Result) -> float:
    """Root mean square of all gradients' differences."""
    differences = [
        (result.gradients[name] - wanted).flatten() for name, wanted in truth.gradients.items() if wanted is not None
    ]
    return float(torch.cat(differences).square().mean().sqrt())


FURTHER_FAMILIES = (
    "bloom",
    "falcon",
    "falcon_h1",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "gpt_oss",
    "mixtral",
    "opt",
    "qwen3_next",
)


@pytest.mark.slow
@pytest.mark.parametrize("family", FURTHER_FAMILIES)
def test_two_stages_on_a_rank_and_a_split_backward_in_further_families(family: str) -> None:
    model, batch = six_layers(family), tiny_batch()
    with float64_throughout():
        stages = make_stages(model, TWO_ON_A_RANK[2], 2)
        assert largest_difference(run_stages(stages, batch, split=True), run_whole(model, batch)) < TOLERANCE
