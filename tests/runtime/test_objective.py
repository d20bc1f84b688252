"""What the last stage makes of logits: sums over chunks, combined, with gradients as if computed at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from lightning_seq1f1b.runtime.adding_up import check_adds_up
from lightning_seq1f1b.runtime.batching import Chunk, Microbatch, cut_groups
from lightning_seq1f1b.runtime.objective import SummedObjective
from lightning_seq1f1b.runtime.row_groups import RowGroup, group_rows
from lightning_seq1f1b.schedule.spans import spans

VOCAB, ROWS, LENGTH = 11, 4, 7


def batch(**further: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 3, -100), **further}


def row_sums(logits: Tensor, chunk: Chunk, microbatch: Microbatch) -> Mapping[str, Tensor]:
    picked = logits.log_softmax(-1).gather(2, chunk.labels.clamp(min=0)[..., None])[..., 0]
    supervised = chunk.labels != -100
    return {
        "log_probability": (picked * supervised).sum(1),
        "tokens": supervised.sum(),
        "unused": logits.square().sum(),
    }


def pairs(sums: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
    margin = sums["log_probability"][0::2] - sums["log_probability"][1::2]
    return {"loss": margin.sigmoid().square().sum(), "tokens": sums["tokens"], "margin": margin.sum()}


def test_gradients_through_combine_are_those_of_one_graph() -> None:
    objective = SummedObjective(row_sums, pairs, rows_together=2)
    logits = torch.randn(ROWS, LENGTH, VOCAB, dtype=torch.float64, requires_grad=True)
    (whole,) = cut_groups(batch(), [RowGroup((0, 1, 2, 3), LENGTH)], [spans([LENGTH])])
    expected = pairs(row_sums(logits, whole.chunks[0], whole), whole)
    (wanted,) = torch.autograd.grad(expected["loss"], logits)
    (cut,) = cut_groups(batch(), [RowGroup((0, 1, 2, 3), LENGTH)], [spans([2, 4, 1])])
    tally = objective.open(cut)
    outputs = [tally.add(chunk, logits[:, chunk.span.start : chunk.span.stop]) for chunk in cut.chunks]
    for chunk in reversed(range(3)):
        outputs[chunk].backward(tally.seed(chunk))
    torch.testing.assert_close(logits.grad, wanted, rtol=0, atol=1e-14)
    result = tally.result()
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value.detach(), rtol=1e-12, atol=1e-12)
        assert not result[name].requires_grad


def test_without_combine_a_metric_takes_no_part_in_the_backward() -> None:
    def sums(logits: Tensor, chunk: Chunk, microbatch: Microbatch) -> Mapping[str, Tensor]:
        return {"loss": logits.square().sum(), "explodes": (logits - logits.detach()).abs().sum().sqrt()}

    (cut,) = cut_groups(batch(), [RowGroup((0,), LENGTH)], [spans([LENGTH])])
    logits = torch.ones(1, LENGTH, VOCAB, requires_grad=True)
    tally = SummedObjective(sums).open(cut)
    output = tally.add(cut.chunks[0], logits)
    output.backward(tally.seed(0))
    assert torch.equal(logits.grad, 2 * logits.detach())


def test_sums_of_low_precision_are_added_in_float32() -> None:
    (cut,) = cut_groups(batch(), [RowGroup((0,), LENGTH)], [spans([1] * LENGTH)])
    tally = SummedObjective(lambda logits, chunk, _: {"loss": logits.sum()}).open(cut)
    values = [256.0, *[1.0] * (LENGTH - 1)]
    for chunk, value in zip(cut.chunks, values, strict=True):
        tally.add(chunk, torch.full((1, 1, 1), value, dtype=torch.bfloat16))
    assert tally.result()["loss"].item() == sum(values)


Sums = Callable[[Tensor, Chunk, Microbatch], Mapping[str, Tensor]]


@pytest.mark.parametrize(
    ("sums", "combine", "message"),
    [
        (lambda *_: {"loss": 1.0}, None, "'loss' as float; it returns tensors"),
        (lambda *_: {"loss": torch.zeros(2)}, None, r"'loss' of shape \[2\]; .* this one a scalar"),
        (lambda *_: {"a": torch.zeros(2, 3)}, lambda *_: {}, r"'a' of shape \[2, 3\].* one value for each row, \[2\]"),
        (lambda *_: {"a": torch.zeros(())}, None, "chunk_loss returned no 'loss', but 'a'"),
        (lambda *_: {"a": torch.zeros(())}, lambda *_: torch.zeros(()), "combine returned no 'loss', but Tensor"),
        (lambda *_: {}, lambda *_: {"loss": torch.zeros(2)}, r"combine returned 'loss' of shape \[2\]"),
        (lambda *_: {}, lambda *_: {"loss": torch.zeros(()), "a": 1}, "combine returned 'a' as int"),
        (lambda _, chunk, __: {str(chunk.unit.chunk): torch.zeros(())}, None, "'1' for chunk 1, but '0' for the one"),
    ],
)
def test_what_cannot_be_added_up_is_refused(sums: Sums, combine: Sums | None, message: str) -> None:
    (cut,) = cut_groups(batch(), [RowGroup((0, 1), LENGTH)], [spans([3, 4])])
    tally = SummedObjective(sums, combine).open(cut)

    def run() -> None:
        for chunk in cut.chunks:
            tally.add(chunk, torch.zeros(2, 3, VOCAB))
        tally.result()

    with pytest.raises(ValueError, match=message):
        run()


def summed(logits: Tensor, chunk: Chunk, microbatch: Microbatch) -> Mapping[str, Tensor]:
    counted = chunk.labels != -100
    values = logits.logsumexp(-1) * counted
    if "loss_weights" in chunk.extras:
        values = values * chunk.extras["loss_weights"]
    return {"loss": values.sum() / chunk.loss_denominator}


def test_a_trial_lets_pass_what_adds_up() -> None:
    for further in ({}, {"loss_weights": torch.zeros(ROWS, LENGTH)}, {"attention_mask": torch.ones(ROWS, LENGTH)}):
        check_adds_up(SummedObjective(summed), batch(**further), VOCAB, ROWS)
    check_adds_up(SummedObjective(row_sums, pairs, rows_together=2), batch(), VOCAB, 2)


def mean(logits: Tensor, chunk: Chunk, microbatch: Microbatch) -> Mapping[str, Tensor]:
    return {"loss": summed(logits, chunk, microbatch)["loss"], "mean": logits.mean()}


def every_token(logits: Tensor, chunk: Chunk, microbatch: Microbatch) -> Mapping[str, Tensor]:
    return {"loss": logits.logsumexp(-1).sum()}


def mean_of_pairs(sums: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
    return {"loss": pairs(sums, microbatch)["loss"] / (microbatch.rows / 2)}


@pytest.mark.parametrize(
    ("objective", "further", "message"),
    [
        (SummedObjective(mean), {}, "'mean' of the given loss does not add up.* chunks of 2, 2, 3 tokens and micro"),
        (SummedObjective(row_sums, mean_of_pairs, rows_together=2), {}, "'loss' .* for 4 row.* and combine a sum"),
        (SummedObjective(every_token), {"attention_mask": torch.ones(ROWS, LENGTH)}, "'loss' .* counts padding"),
    ],
)
def test_a_trial_refuses_what_does_not(objective: SummedObjective, further: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_adds_up(objective, batch(**further), VOCAB, ROWS // objective.rows_together)


def test_a_mean_over_pairs_is_a_sum_where_the_batch_is_one_microbatch() -> None:
    check_adds_up(SummedObjective(row_sums, mean_of_pairs, rows_together=2), batch(), VOCAB, 1)


def test_rows_that_belong_together_share_a_microbatch_longest_first() -> None:
    ends = [3, 5, 9, 1, 9, 2, 4, 4]
    groups = group_rows(ends, None, together=2)
    assert groups == (RowGroup((2, 3), 9), RowGroup((4, 5), 9), RowGroup((0, 1), 5), RowGroup((6, 7), 4))
    assert group_rows(ends, 2, together=2) == (RowGroup((2, 3, 4, 5), 9), RowGroup((0, 1, 6, 7), 5))
