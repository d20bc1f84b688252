"""Documents packed into one row: kept apart, or refused with the reason before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.float64 import float64_throughout
from support.staged_run import Result, largest_difference, make_stages, run_stages, run_whole
from support.tiny_models import tiny_batch, tiny_model
from torch import Tensor
from transformers import DataCollatorWithFlattening

from lightning_seq1f1b.models.batch_checks import checked_batch
from lightning_seq1f1b.models.packing import PackedRows
from lightning_seq1f1b.models.probe import probe
from lightning_seq1f1b.models.rotary import longest_unchanged
from lightning_seq1f1b.runtime.batching import IGNORE_INDEX

LENGTHS = (9, 1, 26, 12)


@pytest.fixture
def double() -> Iterator[None]:
    tiny_model("llama")  # loads what is lifted to double precision
    with float64_throughout():
        yield


def flattened(**options: Any) -> dict[str, Any]:
    """What transformers makes of four documents of together 48 tokens."""
    rows = [tiny_batch(1, length, seed=seed) for seed, length in enumerate(LENGTHS)]
    features = [{name: row[name][0].tolist() for name in row} for row in rows]
    return DataCollatorWithFlattening(return_tensors="pt", **options)(features)


def copied(result: Result) -> Result:
    return Result(
        result.loss, {name: None if each is None else each.clone() for name, each in result.gradients.items()}
    )


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("recompute", [False, True])
def test_stages_agree_with_transformers_on_packed_rows(recompute: bool) -> None:
    """Which keeps documents apart in a row without a mask. Recomputed layers are given the masks they had."""
    model = tiny_model("llama")
    batch = flattened()
    truth = copied(run_whole(model, batch))
    if recompute:
        new_name = hasattr(model, "activation_checkpointing_enable")  # from transformers 5.24 on
        getattr(model, "activation_checkpointing_enable" if new_name else "gradient_checkpointing_enable")()
    result = run_stages(make_stages(model), batch)
    assert largest_difference(result, truth) < 1e-10
    together = run_stages(make_stages(model), {name: batch[name] for name in ("input_ids", "labels")})
    assert abs(together.loss - truth.loss) > 1e-4, "the borders matter"


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_next", "layers 0, 2 of Qwen3NextForCausalLM are recurrent and carry their state on"),
        ("lfm2_moe", r"layers 0, .* of Lfm2MoeForCausalLM are recurrent"),
        ("falcon_h1", "of FalconH1ForCausalLM are recurrent"),
        ("bloom", "of BloomForCausalLM compute attention by themselves"),
        ("llama4_text", "of Llama4ForCausalLM have masks of their own"),
    ],
)
def test_families_that_cannot_keep_documents_apart_refuse_them(family: str, reason: str) -> None:
    model = tiny_model(family)
    packed = PackedRows.of(model, probe(model))
    with pytest.raises(ValueError, match=f"position_ids restart: .* {reason}.*; give each document a row of its own"):
        checked_batch(flattened(), None, packed=packed)
    checked_batch(tiny_batch(), None, packed=packed)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gpt_oss", "deepseek_v3"])
def test_families_that_can(family: str) -> None:
    model = tiny_model(family)
    assert PackedRows.of(model, probe(model)) == PackedRows()


def test_what_transformers_says_beside_the_positions_is_heeded() -> None:
    batch = flattened(return_flash_attn_kwargs=True, return_seq_idx=True)
    checked = checked_batch(batch, None)
    assert checked.keys() == {"input_ids", "labels", "position_ids"}
    wrong = batch["cu_seq_lens_q"].clone()
    wrong[1] += 1
    with pytest.raises(ValueError, match=r"cu_seq_lens_q says that documents begin at \[0, 10, 10, 36\]"):
        checked_batch({**batch, "cu_seq_lens_q": wrong}, None)
    with pytest.raises(ValueError, match="seq_idx changes at other tokens"):
        checked_batch({**batch, "seq_idx": torch.zeros_like(batch["seq_idx"])}, None)
    del batch["position_ids"]
    with pytest.raises(ValueError, match=r"cu_seq_lens_k, cu_seq_lens_q, .* without position_ids"):
        checked_batch(batch, None)


def test_borders_of_several_rows_follow_one_another() -> None:
    positions = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]])
    ids = torch.ones_like(positions)
    batch = {"input_ids": ids, "labels": ids.masked_fill(positions == 0, IGNORE_INDEX), "position_ids": positions}
    checked_batch({**batch, "cu_seq_lens_q": torch.tensor([0, 2, 4, 5, 8], dtype=torch.int32)}, None)


def packed(**changes: Tensor) -> dict[str, Tensor]:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0]])
    ids = torch.ones_like(positions)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(positions == 0, IGNORE_INDEX),
        "position_ids": positions,
        **changes,
    }


def test_unsound_packed_rows_are_refused() -> None:
    checked_batch(packed(), None)
    with pytest.raises(ValueError, match="a document inside a packed row has a label"):
        checked_batch(packed(labels=torch.ones(1, 7).long()), None)
    with pytest.raises(ValueError, match="there is an attention_mask, under which transformers does not keep"):
        checked_batch(packed(attention_mask=torch.ones(1, 7).long()), None)
    with pytest.raises(ValueError, match="the routers' auxiliary loss counts"):
        checked_batch(packed(), None, packed=PackedRows(counts_padding=True))


def test_the_longest_document_of_a_packed_row_needs_positions() -> None:
    checked_batch(packed(), 3)
    with pytest.raises(ValueError, match="rows of 3 tokens, but the model has positions for 2"):
        checked_batch(packed(), 2)


def test_frequencies_by_the_length_of_the_row_allow_short_documents_only() -> None:
    scaled = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    assert longest_unchanged(scaled) == 511
    assert longest_unchanged(tiny_model("llama")) is None
    rule = PackedRows(longest=2)
    with pytest.raises(ValueError, match="ends at position 3, but beyond 2 tokens the model's rotary embeddings"):
        checked_batch(packed(), None, packed=rule)
    checked_batch({name: tensor[:, 3:] for name, tensor in packed().items()}, None, packed=rule)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_short_documents_under_such_frequencies_are_exact(kind: str) -> None:
    parameters: dict[str, Any] = {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 40}
    model = tiny_model("llama", rope_parameters=parameters, max_position_embeddings=40 if kind == "dynamic" else 80)
    assert longest_unchanged(model) == 39
    batch = flattened()  # a row longer than 40
    truth = copied(run_whole(model, batch))
    assert largest_difference(run_stages(make_stages(model), batch), truth) < 1e-10
