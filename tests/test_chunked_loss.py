"""`chunked_loss` on one device, and what it hands to a cut model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from support.tiny_models import tiny_batch, tiny_model
from torch import Tensor

from lightning_seq1f1b import chunked_loss
from lightning_seq1f1b.models.facade import install
from lightning_seq1f1b.runtime.objective import SummedObjective
from lightning_seq1f1b.runtime.step_result import StepResult

ROWS, LENGTH = 2, 12


def batch(**further: Any) -> dict[str, Any]:
    return {**tiny_batch(ROWS, LENGTH), **further}


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """[rows, length - 1], of the targets that follow each token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none").view(ROWS, -1)


def logits_of(given: dict[str, Any]) -> Tensor:
    return tiny_model("llama")(input_ids=given["input_ids"]).logits


def test_the_default_is_the_cross_entropy_by_the_number_of_supervised_tokens() -> None:
    given = batch()
    model = tiny_model("llama")
    expected = model(**given)
    output = chunked_loss(model, given)
    torch.testing.assert_close(output.loss, expected.loss.double(), rtol=1e-6, atol=0)
    assert output.metrics == {}
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("items", [None, 7])
def test_weights_are_those_of_the_labels(items: int | None) -> None:
    weights = torch.rand(ROWS, LENGTH, dtype=torch.float64)
    given = batch(loss_weights=weights)
    losses = token_losses(logits_of(given), given["labels"])
    supervised = given["labels"][:, 1:] != -100
    total = (weights[:, 1:] * supervised).sum() if items is None else items
    loss = chunked_loss(tiny_model("llama"), {**given, "num_items_in_batch": items}).loss
    torch.testing.assert_close(loss, (losses * weights[:, 1:]).sum() / total, rtol=1e-12, atol=0)


def test_weights_of_zero_give_zero() -> None:
    assert chunked_loss(tiny_model("llama"), batch(loss_weights=torch.zeros(ROWS, LENGTH))).loss == 0


def test_functions_are_given_what_they_name() -> None:
    seen: dict[str, Any] = {}
    teacher, ages = torch.randn(ROWS, LENGTH, 5), torch.arange(ROWS)

    def losses(
        logits: Tensor, labels: Tensor, teacher: Tensor, num_items_in_batch: Tensor, attention_mask: Tensor
    ) -> Any:
        seen.update(labels=labels, teacher=teacher, items=num_items_in_batch, mask=attention_mask)
        return {"of_rows": logits.sum((1, 2))}

    def at_end(sums: dict[str, Tensor], ages: Tensor) -> Any:
        seen.update(ages=ages, sums=sums)
        return {"loss": (sums["of_rows"] * ages).sum(), "largest": sums["of_rows"].max()}

    given = batch(teacher=teacher, ages=ages)
    output = chunked_loss(tiny_model("llama"), given, losses, at_end)
    assert torch.equal(seen["labels"], F.pad(given["labels"][:, 1:], (0, 1), value=-100))
    assert torch.equal(seen["teacher"], teacher)
    assert torch.equal(seen["ages"], ages)
    assert seen["items"] == (given["labels"][:, 1:] != -100).sum()
    assert bool((seen["mask"] == 1).all())
    assert seen["mask"].shape == (ROWS, LENGTH)
    assert torch.equal(output.loss, seen["sums"]["of_rows"][1])
    assert output.metrics.keys() == {"largest"}
    assert not output.metrics["largest"].requires_grad


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.sum()


def takes_any(logits: Tensor, labels: Tensor, **further: Tensor) -> Tensor:
    return logits.sum()


def at_end(sums: dict[str, Tensor], teacher: Tensor) -> dict[str, Tensor]:
    return sums


@pytest.mark.parametrize(
    ("further", "functions", "rows_together", "message"),
    [
        ({"labels": None}, {}, 1, "it needs input_ids and labels, both"),
        ({"teacher": torch.zeros(ROWS)}, {"chunk_loss": losses}, 1, "'teacher', which neither the model nor chunk"),
        ({"teacher": torch.zeros(ROWS, 3)}, {"chunk_loss": takes_any}, 1, r"'teacher' of the batch is \[2, 3\]; .* \["),
        ({"teacher": ["a", "b"]}, {"chunk_loss": takes_any}, 1, "'teacher' of the batch is list"),
        (
            {"teacher": torch.zeros(ROWS, LENGTH)},
            {"chunk_loss": losses, "combine": at_end},
            1,
            "combine names 'teacher', which has a value for each token",
        ),
        ({}, {"chunk_loss": losses, "combine": takes_any}, 3, "rows_together=3 does not divide the 2 rows"),
        ({}, {"combine": takes_any}, 1, "combine needs chunk_loss"),
        ({}, {"chunk_loss": lambda logits, labels: logits.sum(-1)}, 1, r"'loss' of shape \[2, 12\]"),
    ],
)
def test_what_does_not_fit_is_refused(
    further: dict[str, Any], functions: dict[str, Any], rows_together: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        chunked_loss(tiny_model("llama"), batch(**further), **functions, rows_together=rows_together)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_cut_model_is_asked_for_it_through_a_single_call(adapted: bool) -> None:
    asked: list[tuple[dict[str, Tensor], Any]] = []

    def run(given: dict[str, Tensor], objective: Any) -> StepResult:
        asked.append((given, objective))
        return StepResult(torch.tensor(1.5), {"metric": torch.tensor(2.0)})

    model = tiny_model("llama")
    install(model, run)
    called: Any = get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if adapted else model
    teacher, ages = torch.zeros(ROWS, LENGTH, 3), torch.zeros(ROWS)
    output = chunked_loss(called, batch(teacher=teacher, ages=ages), takes_any, takes_any, rows_together=2)
    assert output.loss == 1.5
    assert output.metrics == {"metric": torch.tensor(2.0)}
    ((given, objective),) = asked
    assert given.keys() == {"input_ids", "labels"}
    assert isinstance(objective, SummedObjective)
    assert objective.rows_together == 2
    assert objective.tensors.keys() == {"teacher"}
    assert objective.row_tensors.keys() == {"ages"}


def identity_of(model: Any, function: Any) -> Any:
    asked: list[Any] = []

    def run(given: dict[str, Tensor], objective: Any) -> StepResult:
        asked.append(objective)
        return StepResult(torch.tensor(1.5))

    install(model, run)
    chunked_loss(model, batch(), function)
    return asked[0].identity


def made(factor: float, tensor: Tensor) -> Any:
    return lambda logits, labels: logits.sum() * factor * tensor


def test_a_function_made_anew_in_every_step_is_tried_once() -> None:
    model = tiny_model("llama")
    first, second = (identity_of(model, made(2.0, torch.rand(3))) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert identity_of(model, made(3.0, torch.rand(3))) != first
    assert identity_of(model, losses) != first
