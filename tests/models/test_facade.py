"""`model(**batch)` on a cut model: what it accepts, what it hands on, what it returns."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.staged_run import LAYER_RANGES
from support.tiny_models import tiny_batch, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from lightning_seq1f1b.models.facade import install, original_forward
from lightning_seq1f1b.models.split import cut
from lightning_seq1f1b.runtime.objective import EvaluationLogits, Objective
from lightning_seq1f1b.runtime.step_result import StepResult

LOSS = torch.tensor(4.2)
RESULT = StepResult(LOSS)


def installed(family: str = "llama", stage: int | None = None) -> tuple[PreTrainedModel, list[dict[str, Tensor]]]:
    """A model behind a facade, and the batches that reach the pipeline."""
    model = tiny_model(family)
    if stage is not None:
        cut(model, [stage], LAYER_RANGES)
    batches: list[dict[str, Tensor]] = []

    def run(batch: dict[str, Tensor], objective: Objective | None) -> StepResult:
        batches.append(batch)
        return RESULT

    install(model, run)
    return model, batches


def test_the_batch_reaches_the_pipeline_and_its_loss_comes_back() -> None:
    model, batches = installed()
    batch = tiny_batch()
    mask = torch.ones_like(batch["input_ids"])
    output = model(**batch, attention_mask=mask, position_ids=torch.arange(48)[None], num_items_in_batch=7)
    assert batches[0].keys() == {"input_ids", "labels", "attention_mask", "position_ids", "num_items_in_batch"}
    assert torch.equal(batches[0]["input_ids"], batch["input_ids"])
    assert torch.equal(batches[0]["labels"], batch["labels"])
    assert batches[0]["num_items_in_batch"].item() == 7
    assert output.loss is output["loss"] is output[0] is LOSS


def test_arguments_by_position_and_those_without_effect() -> None:
    model, batches = installed()
    batch = tiny_batch()
    model(batch["input_ids"].int(), None, labels=batch["labels"].int(), use_cache=True, return_dict=True, cache=None)
    assert batches[0].keys() == {"input_ids", "labels"}
    assert all(tensor.dtype == torch.int64 for tensor in batches[0].values())
    assert torch.equal(batches[0]["input_ids"], batch["input_ids"])


def test_the_signature_is_still_the_models() -> None:
    model, _ = installed()
    assert inspect.signature(model.forward) == inspect.signature(original_forward(model))


def test_a_peft_model_calls_the_facade_inside_it() -> None:
    model, batches = installed()
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert wrapped(**tiny_batch()).loss is LOSS
    assert batches[0].keys() == {"input_ids", "labels"}


def test_the_output_has_no_logits() -> None:
    output = installed()[0](**tiny_batch())
    with pytest.raises(AttributeError, match="no 'logits', only 'loss': logits and hidden states exist on one stage"):
        _ = output.logits
    with pytest.raises(KeyError, match="no 'logits', only 'loss'"):
        _ = output["logits"]
    with pytest.raises(KeyError, match="no 1, only 'loss'"):
        _ = output[1]
    assert list(output) == ["loss"]
    assert output.get("logits") is None
    assert not hasattr(output, "hidden_states")


def test_evaluation_with_logits_needs_no_labels() -> None:
    model, asked = tiny_model("llama"), []
    logits = torch.randn(2, 48, 97)

    def run(batch: dict[str, Tensor], objective: Objective | None) -> StepResult:
        asked.append((sorted(batch), type(objective)))
        return StepResult(None if objective else LOSS, logits=logits if objective else None)

    install(model, run, evaluation_logits=True)
    batch = tiny_batch()
    with torch.no_grad():
        output = model(input_ids=batch["input_ids"])
    assert output.loss is None
    assert output.logits is output["logits"] is output[0] is logits
    assert model(**batch).loss is LOSS
    assert asked == [(["input_ids"], EvaluationLogits), (["input_ids", "labels"], type(None))]
    with pytest.raises(ValueError, match="a batch without labels"):
        model(input_ids=batch["input_ids"])


def test_a_loss_function_set_after_the_cut_is_tried() -> None:
    model, batches = installed()
    model.loss_function = lambda logits, labels, **kwargs: logits.mean()
    with pytest.raises(ValueError, match="does not add up over chunks"):
        model(**tiny_batch())
    assert not batches


def test_the_original_forward_stays_behind_every_new_facade() -> None:
    model = tiny_model("llama")
    batch = tiny_batch()
    expected = model(**batch).loss
    install(model, lambda *_: RESULT)
    install(model, lambda *_: StepResult(LOSS + 1))
    assert model(**batch).loss == LOSS + 1
    assert torch.equal(original_forward(model)(**batch).loss, expected)


def test_a_forward_set_on_the_model_itself_is_kept() -> None:
    model = tiny_model("llama")

    def forward(input_ids: Tensor) -> str:
        return "mine"

    model.forward = forward
    install(model, lambda *_: RESULT)
    assert original_forward(model) is forward


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "a batch without labels: .* returns only its loss, in evaluation too"),
        ({"input_ids": None}, "a batch without input_ids"),
        ({"inputs_embeds": torch.zeros(2, 48, 32)}, "does not take 'inputs_embeds'; it takes input_ids, labels, "),
        ({"output_hidden_states": True}, "does not take 'output_hidden_states'"),
        ({"token_type_ids": torch.zeros(2, 48)}, "does not take 'token_type_ids'"),
        ({"input_ids": torch.zeros(48).long()}, r"in the shape \[rows, length\], not torch.int64 \[48\]"),
        ({"input_ids": torch.zeros(2, 48)}, "input_ids are whole numbers"),
        ({"input_ids": torch.zeros(2, 0).long()}, r"not torch.int64 \[2, 0\]"),
        ({"labels": torch.zeros(2, 47).long()}, r"labels have the shape \[2, 47\], input_ids \[2, 48\]"),
        ({"labels": torch.zeros(2, 48)}, "labels are whole numbers, not torch.float32"),
        ({"attention_mask": torch.ones(2, 1, 48, 48)}, r"attention_mask has the shape \[2, 1, 48, 48\]"),
        ({"position_ids": torch.arange(48)}, r"position_ids have the shape \[48\], input_ids \[2, 48\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_batches_that_are_refused(changes: dict[str, Any], message: str, training: bool) -> None:
    model, batches = installed()
    model.train(training)
    with pytest.raises(ValueError, match=message):
        model(**{**tiny_batch(), **changes})
    assert not batches


def test_unknown_arguments_are_named_even_if_the_model_would_swallow_them() -> None:
    model, _ = installed()
    with pytest.raises(ValueError, match="does not take 'loss_weights'"):
        model(**tiny_batch(), loss_weights=torch.ones(2, 48))


def test_left_padding_must_not_predict_the_first_real_token() -> None:
    model, batches = installed()
    batch = tiny_batch(ignored=0.0)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, :5] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    with pytest.raises(ValueError, match="padded at the left and its first real token has a label"):
        model(input_ids=batch["input_ids"], labels=labels, attention_mask=mask)
    labels[1, 5] = -100
    model(input_ids=batch["input_ids"], labels=labels, attention_mask=mask)
    assert len(batches) == 1


def test_positions_of_padded_rows_are_not_taken_for_packed_documents() -> None:
    model, batches = installed()
    batch = tiny_batch()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 30:] = 0
    model(**batch, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).masked_fill(mask == 0, 1))
    assert len(batches) == 1


@pytest.mark.parametrize("stage", [None, 0, 1, 2])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_rows_longer_than_the_positions_a_model_has_learned(family: str, stage: int | None) -> None:
    model, batches = installed(family, stage)
    model(**tiny_batch(length=512))
    with pytest.raises(ValueError, match="rows of 513 tokens, but the model has positions for 512"):
        model(**tiny_batch(length=513))
    assert len(batches) == 1


def test_rotary_positions_have_no_end() -> None:
    model, batches = installed("llama")
    model(**tiny_batch(length=600))
    assert len(batches) == 1
