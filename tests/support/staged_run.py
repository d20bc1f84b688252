"""Run a model whole, and cut into stages and chunks in one process; losses and gradients of both by parameter name."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_seq1f1b.models.split import cut
from lightning_seq1f1b.models.stage import HuggingFaceStage
from lightning_seq1f1b.models.stage import make_stages as make_stages_of
from lightning_seq1f1b.runtime.batching import cut_batch, loss_denominator, shift_labels
from lightning_seq1f1b.runtime.split_backward import DeferredGradients, SplitBackward
from lightning_seq1f1b.schedule.spans import spans

LAYER_RANGES = (range(1), range(1, 3), range(3, 4))
CHUNK_LENGTHS = (7, 13, 2, 15, 11)


@dataclass(frozen=True)
class Result:
    """A loss, and the gradient of every parameter by its name in the whole model; None where there is none."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


def run_whole(model: PreTrainedModel, batch: dict[str, Tensor]) -> Result:
    """Forward and backward of the model itself, as on one device."""
    model.zero_grad(set_to_none=True)
    items = loss_denominator(shift_labels(batch["labels"]), None, batch["labels"].device)
    loss = model(**batch, num_items_in_batch=items, use_cache=False).loss
    loss.backward()
    return Result(loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()})


def make_stages(
    model: PreTrainedModel, layer_ranges: Sequence[range] = LAYER_RANGES, num_ranks: int | None = None
) -> list[HuggingFaceStage]:
    """The stages of a model; those of each rank are cut from a copy of its own. One on a rank, or dealt in turn."""
    num_ranks = len(layer_ranges) if num_ranks is None else num_ranks
    stages: dict[int, HuggingFaceStage] = {}
    for rank in range(num_ranks):
        split = cut(copy.deepcopy(model), range(rank, len(layer_ranges), num_ranks), layer_ranges)
        stages.update(make_stages_of(split))
    return [stages[index] for index in range(len(layer_ranges))]


def run_stages(
    stages: Sequence[HuggingFaceStage],
    batch: dict[str, Tensor],
    chunk_lengths: Sequence[int] = CHUNK_LENGTHS,
    num_microbatches: int = 1,
    *,
    split: bool = False,
    scale: Tensor | None = None,
) -> Result:
    """Every forward, then every backward, last chunk first, on all stages in turn.

    With `split`, the weight gradients of linear layers are computed after all backwards of a microbatch. With `scale`
    all gradients are multiplied by it, from the start.
    """
    loss = torch.zeros((), dtype=torch.float64)
    splits = {stage.index: SplitBackward(stage.linears if split else ()) for stage in stages}
    for microbatch in cut_batch(batch, num_microbatches, spans(chunk_lengths)):
        states = [stage.open(microbatch, training=True) for stage in stages]
        in_flight: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        for number, chunk in enumerate(microbatch.chunks):
            hidden = None
            for stage, state in zip(stages, states, strict=True):
                with splits[stage.index].deferring():
                    output = stage.forward(chunk, hidden, state)
                in_flight[stage.index, number] = hidden, output
                hidden = output.detach().requires_grad_()
        due = []
        for number in reversed(range(len(microbatch.chunks))):
            gradient: Tensor | None = None
            for stage, state in zip(reversed(stages), reversed(states), strict=True):
                hidden, output = in_flight.pop((stage.index, number))
                due.append(DeferredGradients())
                with splits[stage.index].deferring(due[-1]):
                    if stage is stages[-1]:
                        gradient = state.seed(number, scale)
                    roots, gradients = state.carried(number, scale)
                    torch.autograd.backward([output, *roots], [gradient, *gradients])
                gradient = None if hidden is None else hidden.grad
        loss += states[-1].result()["loss"]
        for state in states:
            state.close()
        assert any(map(len, due)) == (split and any(stage.linears for stage in stages))
        for deferred in due:
            deferred.accumulate()
    return Result(loss, summed_gradients(stages))


def summed_gradients(stages: Sequence[HuggingFaceStage]) -> dict[str, Tensor | None]:
    """Gradients by name; of a parameter on several ranks the sum."""
    total: dict[str, Tensor | None] = {}
    for model in {id(stage.model): stage.model for stage in stages}.values():
        for name, parameter in model.named_parameters():
            before = total.get(name)
            both = before is not None and parameter.grad is not None
            total[name] = before + parameter.grad if both else parameter.grad if before is None else before
    return total


def largest_difference(result: Result, truth: Result) -> float:
    """The largest difference of the loss, and of any gradient relative to its largest entry; names must agree.

    A gradient that is rounding noise around zero, such as that of a bias on all keys, is compared relative to a
    millionth of the model's largest gradient.
    """
    assert result.gradients.keys() == truth.gradients.keys()
    floor = 1e-6 * max(float(gradient.abs().max()) for gradient in truth.gradients.values() if gradient is not None)
    differences = [(result.loss - truth.loss).abs()]
    for name, wanted in truth.gradients.items():
        got = result.gradients[name]
        if wanted is None or got is None:
            assert not any(torch.any(gradient) for gradient in (wanted, got) if gradient is not None), name
            continue
        differences.append((got - wanted).abs().max() / wanted.abs().max().clamp(min=floor))
    return float(torch.stack(differences).max())
