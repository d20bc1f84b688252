"""Losses of the user's own equal one device's, with all gradients and metrics, in double precision."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
from support.exact_training import largest_difference
from support.fitting import ONE_DEVICE, TWO_STAGES, Where, everywhere, fit, rows, stages
from support.loss_training import LENGTH, Case, Outcome, PairedRows, train, train_all
from support.processes import ProcessFailedError, run_processes
from support.training import QUIET, FineTune
from torch.utils.data import DataLoader
from torchmetrics.text import Perplexity

from lightning_seq1f1b import Seq1F1BStrategy, chunked_loss

TOLERANCE = 1e-10


def case(module: str, family: str = "llama", *, padded: bool = False, **strategy: Any) -> Case:
    return Case(module, tuple(strategy.items()), family, padded)


CASES = {
    2: (
        case("weighted", num_chunks=1),
        case("weighted", "gpt2", num_chunks=3, padded=True),
        case("distilled", num_chunks=3, padded=True, layers=(3, 1), partition="even"),
        case("preferred", num_chunks=3, padded=True),
        case("preferred", "gpt2", num_chunks=3, virtual_stages=2, schedule="interleaved_seq1f1b_zb"),
        case("tempered", num_chunks=3, schedule="seq1f1b_zb"),
        case("smoothed", "gpt2", num_chunks=3),
        case("counted", num_chunks=3, schedule="seq1f1b_zb"),
        case("unsupervised", num_chunks=3),
    ),
    3: (
        case("weighted", num_chunks=3, schedule="seq1f1b_zb"),
        case("distilled", "gpt2", num_chunks=1),
        case("distilled", partition=(2, 13, 8), num_microbatches=2),
        case("preferred", num_chunks=3, padded=True, schedule="seq1f1b_zb", layers=(1, 2, 1)),
        case("preferred", num_chunks=2, num_microbatches=1),
        case("smoothed", num_chunks=3, padded=True, layers=(2, 1, 1)),
    ),
}
"""What is trained, by the number of ranks."""


@functools.cache
def one_device(each: Case) -> Outcome:
    return train(Case(each.module, family=each.family, padded=each.padded), None)


@functools.cache
def over_stages(devices: int) -> dict[Case, list[Outcome]] | ProcessFailedError:
    try:
        by_rank = run_processes(train_all, devices, devices, CASES[devices])
    except ProcessFailedError as error:
        return error
    return {each: [outcomes[place] for outcomes in by_rank] for place, each in enumerate(CASES[devices])}


def trained(devices: int, each: Case) -> list[Outcome]:
    results = over_stages(devices)
    if isinstance(results, ProcessFailedError):
        raise results
    return results[each]


ALL = [(devices, each) for devices, cases in CASES.items() for each in cases if each.module != "unsupervised"]


@pytest.mark.parametrize(("devices", "each"), ALL, ids=lambda value: getattr(value, "module", value))
def test_a_loss_equals_that_of_one_device(devices: int, each: Case) -> None:
    truth, by_rank = one_device(each), trained(devices, each)
    assert truth.run.losses[0] != truth.run.losses[1]
    assert largest_difference([outcome.run for outcome in by_rank], truth.run) < TOLERANCE
    for outcome in by_rank:
        assert outcome.logged == by_rank[0].logged
        for logged, expected in zip(outcome.logged, truth.logged, strict=True):
            assert logged == pytest.approx(expected, rel=0, abs=TOLERANCE)
    assert [sorted(logged) for logged in truth.logged] == [METRICS.get(each.module, [])] * 2


REWARDS = [f"reward_{row}" for row in range(4)]
METRICS = {"distilled": ["in_top_30", "z_loss"], "preferred": ["margin", *REWARDS]}


def test_a_batch_without_a_supervised_token_has_loss_and_gradients_of_zero() -> None:
    names = set()
    for outcome in trained(2, case("unsupervised", num_chunks=3)):
        assert outcome.run.losses == [0.0, 0.0]
        for gradients in outcome.run.gradients:
            assert not any(gradient.any() for gradient in gradients.values())
        names |= outcome.run.gradients[0].keys()
    assert names == set(one_device(case("weighted")).run.gradients[0])


class Evaluated(FineTune):
    """Perplexity by torchmetrics over the logits; predictions need no labels."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.perplexity = Perplexity(ignore_index=-100)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        outputs = self.model(**batch)
        self.perplexity.update(outputs.logits[:, :-1], batch["labels"][:, 1:])
        self.log_dict({"loss": outputs.loss, "perplexity": self.perplexity})

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        without = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        assert without.loss is None
        assert list(without) == ["logits"]
        return without["logits"]


KNOB = stages(evaluation_logits=True)


def evaluated(where: Where) -> tuple[dict[str, float], list[torch.Tensor]]:
    torch.manual_seed(0)
    strategy = where.strategy if isinstance(where.strategy, str) else Seq1F1BStrategy(**dict(where.strategy))
    trainer, module = L.Trainer(**QUIET, devices=where.devices, strategy=strategy), Evaluated()
    columns = PairedRows(padded=True).columns
    kept = ("input_ids", "labels", "attention_mask")
    loader = DataLoader([{name: columns[name][row] for name in kept} for row in range(7)], batch_size=4)
    (metrics,) = trainer.validate(module, loader, verbose=False)
    return metrics, trainer.predict(module, loader)


class PackedPrediction(FineTune):
    """Logits of rows that end with a document of one token, which is not padding."""

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        return self.model(**batch, use_cache=False).logits


def packed(where: Where) -> list[torch.Tensor]:
    torch.manual_seed(0)
    strategy = where.strategy if isinstance(where.strategy, str) else Seq1F1BStrategy(**dict(where.strategy))
    ids = torch.arange(3, 3 + LENGTH) % 97
    positions = torch.cat([torch.arange(9), torch.arange(LENGTH - 10), torch.zeros(1, dtype=torch.int64)])
    loader = DataLoader([{"input_ids": ids, "position_ids": positions}])
    trainer = L.Trainer(**QUIET, devices=where.devices, strategy=strategy)
    return trainer.predict(PackedPrediction(dtype=torch.float32), loader)


EVALUATED = (evaluated, packed)


def test_evaluation_gives_logits_of_documents_of_one_token_too() -> None:
    (expected,) = everywhere(EVALUATED, ONE_DEVICE)[packed][0]
    for (got,) in everywhere(EVALUATED, KNOB)[packed]:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_evaluation_gives_logits_on_every_rank_in_the_order_of_the_batch() -> None:
    cases = EVALUATED
    expected_metrics, expected_logits = everywhere(cases, ONE_DEVICE)[evaluated][0]
    mask = PairedRows(padded=True).columns["attention_mask"].bool()
    for metrics, logits in everywhere(cases, KNOB)[evaluated]:
        for name in ("loss", "perplexity"):
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5)
        for place, (got, expected) in enumerate(zip(logits, expected_logits, strict=True)):
            assert got.shape == expected.shape == (4 - place, LENGTH, 97)
            real = mask[4 * place : 4 * place + len(got)]
            torch.testing.assert_close(got[real], expected[real], rtol=1e-4, atol=1e-4)


def without_the_knob(where: Where) -> str:
    with pytest.raises(AttributeError) as caught:
        evaluated(where)
    return str(caught.value)


class Averaged(FineTune):
    """A loss that does not add up: a mean over each chunk."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return chunked_loss(self.model, batch, mean).loss


def mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def averaged(where: Where) -> str:
    with pytest.raises(ValueError, match="does not add up") as caught:
        fit(where, Averaged(), rows())
    return str(caught.value)


REFUSED = (without_the_knob, averaged)


def test_without_the_knob_evaluation_says_how_to_have_logits() -> None:
    for message in everywhere(REFUSED, TWO_STAGES)[without_the_knob]:
        assert "no 'logits', only 'loss'" in message
        assert "Seq1F1BStrategy(evaluation_logits=True)" in message


def test_a_loss_that_does_not_add_up_is_refused_on_every_rank() -> None:
    first, second = everywhere(REFUSED, TWO_STAGES)[averaged]
    assert first == second
