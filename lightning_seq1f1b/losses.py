"""`chunked_loss`: a loss of one's own on the logits of a model, on one device as over pipeline stages and chunks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seq1f1b.models.facade import OBJECTIVE, is_cut
from lightning_seq1f1b.models.packing import BORDERS
from lightning_seq1f1b.runtime.batching import IGNORE_INDEX, Chunk, Microbatch, cut_groups, shift_labels
from lightning_seq1f1b.runtime.objective import LOSS, SummedObjective
from lightning_seq1f1b.runtime.row_groups import RowGroup
from lightning_seq1f1b.schedule.spans import spans

WEIGHTS = "loss_weights"
"""Weights of the tokens in a batch, aligned with its labels."""

_TOKENS = ("input_ids", "attention_mask", "position_ids")
_OF_MODEL = (*_TOKENS, *BORDERS)
_OF_LOSS = ("labels", "num_items_in_batch")
_PROVIDED = ("num_items_in_batch", "attention_mask")
"""What `chunk_loss` is given beside the batch's further tensors, where it names it."""


@dataclass(frozen=True)
class ChunkedLoss:
    """What `chunked_loss` returns, the same on every rank.

    Attributes:
        loss: 0-d; backward goes through the model.
        metrics: by name, 0-d or one value for each row of the batch, [rows]; without autograd.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def chunked_loss(
    model: nn.Module,
    batch: Mapping[str, Any],
    chunk_loss: Callable[..., Tensor | Mapping[str, Tensor]] | None = None,
    combine: Callable[..., Mapping[str, Tensor]] | None = None,
    *,
    rows_together: int = 1,
) -> ChunkedLoss:
    """Run a batch through a causal language model and make a loss of its logits, chunk by chunk.

    Under `Seq1F1BStrategy` this is the whole pipelined step, like `model(**batch).loss`; on one device, or under any
    other strategy, the model runs as a whole, and the numbers are the same. Under the pipeline no more logits are alive
    than those of the chunks in flight on the last stage.

    Args:
        model: the causal language model of a LightningModule, or a peft model around it; cut into stages or whole.
        batch: `input_ids` and `labels` [rows, length] (not shifted, -100 where there is no target); optionally
            `attention_mask`, `position_ids` and `num_items_in_batch` as for the model; `loss_weights` [rows, length],
            the weights of the labels; and further tensors that the functions name as arguments: [rows, length, ...],
            such as a teacher's logits, or [rows], such as log-probabilities under a reference model.
        chunk_loss: called with the logits [rows, tokens, vocabulary] and the labels [rows, tokens] of a chunk, the
            labels shifted: `labels[:, t]` is the target of `logits[:, t]`. By keyword it is given what else it names
            (everything but `attention_mask`, if it takes `**kwargs`): further tensors of the batch for the chunk's rows
            and tokens ("loss_weights" shifted like the labels), `num_items_in_batch` (0-d: the batch's, else the number
            of its supervised tokens, 1 at least) and `attention_mask` [rows, tokens]. It returns the loss, 0-d, or
            tensors by name, the "loss" and metrics: sums over the chunk's tokens, 0-d or, but for the loss, one for
            each row, [rows]. The values of all chunks are added up. Padding must not count. By default the
            cross-entropy, weighted if there are weights, divided by `num_items_in_batch`, else by the sum of the
            weights of the supervised tokens.
        combine: called with the sums of a microbatch once all of its chunks have been seen, such as the log-probability
            of each sequence. By keyword it is given what it names of the batch's tensors of shape [rows]. It returns
            the "loss" and metrics, any functions of the sums, 0-d or, but for the loss, [rows]. Scalars are added up
            over the microbatches: a mean over rows is a sum divided by a number of the whole batch.
        rows_together: with `combine`, so many neighbouring rows belong together, such as 2 for chosen and rejected
            answers, and stay in one microbatch. `num_microbatches` of the strategy then counts such groups.

    Returns:
        The loss and the metrics, which are equal on all ranks and can be logged on all of them.

    Raises:
        ValueError: an entry of the batch does not fit or is named by no function; or, under `Seq1F1BStrategy`, a trial
            on small random logits shows that the parts do not add up to the whole.
    """
    asked = _objective(batch, chunk_loss, combine, rows_together)
    inputs = {name: batch[name] for name in _OF_MODEL if batch.get(name) is not None}
    items = _num_items(batch, weighted=chunk_loss is None)
    of_loss = {"labels": batch["labels"], **({} if items is None else {"num_items_in_batch": items})}
    if is_cut(model):
        output = model(**inputs, **of_loss, **{OBJECTIVE: asked})
        return ChunkedLoss(output.loss, output.metrics)
    logits = model(**inputs, use_cache=False).logits
    rows, length = batch["input_ids"].shape
    whole = [RowGroup(tuple(range(rows)), length)]
    tokens = {name: inputs[name] for name in _TOKENS if name in inputs}
    (microbatch,) = cut_groups({**tokens, **of_loss, **asked.tensors}, whole, [spans([length])])
    given = dict(asked.combined(asked.chunk_sums(logits, microbatch.chunks[0], microbatch), microbatch))
    return ChunkedLoss(given.pop(LOSS), {name: value.detach() for name, value in given.items()})


def _objective(
    batch: Mapping[str, Any],
    chunk_loss: Callable[..., Any] | None,
    combine: Callable[..., Any] | None,
    rows_together: int,
) -> SummedObjective:
    """What the last stage is asked for, after all checks of the batch."""
    if chunk_loss is None and combine is not None:
        raise ValueError("combine needs chunk_loss, which gives the sums that it combines")
    of_chunk: Callable[..., Any] = _cross_entropy if chunk_loss is None else chunk_loss
    labels, input_ids = batch.get("labels"), batch.get("input_ids")
    if input_ids is None or labels is None:
        raise ValueError(
            f"the batch has {', '.join(sorted(batch))}; it needs input_ids and labels, both [rows, length], with "
            f"{IGNORE_INDEX} where there is no target"
        )
    rows, length = input_ids.shape
    if combine is None:
        rows_together = 1
    if rows_together < 1 or rows % rows_together:
        raise ValueError(f"rows_together={rows_together} does not divide the {rows} rows of the batch")
    wanted, wanted_at_end = _takes(of_chunk), _takes(combine) if combine is not None else frozenset[str]()
    by_token: dict[str, Tensor] = {}
    by_row: dict[str, Tensor] = {}
    for name, value in batch.items():
        if name in _OF_MODEL or name in _OF_LOSS or value is None:
            continue
        if not (wanted is None or name in wanted or wanted_at_end is None or name in wanted_at_end):
            raise ValueError(
                f"the batch has {name!r}, which neither the model nor chunk_loss or combine takes; name it as an "
                "argument of theirs, or leave it out"
            )
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[:2] == (rows, length):
            by_token[name] = value
        elif isinstance(value, Tensor) and value.shape == (rows,):
            by_row[name] = value
        else:
            kind = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{name!r} of the batch is {kind}; chunks can be given tensors of shape [{rows}, {length}, ...], or "
                f"[{rows}] with one value a row. What is the same for all rows, let chunk_loss close over"
            )
    unfit = None if wanted_at_end is None else sorted(wanted_at_end & by_token.keys())
    if unfit:
        raise ValueError(f"combine names {unfit[0]!r}, which has a value for each token; it can be given [rows] only")

    def sums(logits: Tensor, chunk: Chunk, microbatch: Microbatch) -> Mapping[str, Tensor]:
        given = {**chunk.extras, **_of_rows(by_row, microbatch), "num_items_in_batch": chunk.loss_denominator}
        if wanted is not None and "attention_mask" in wanted:
            real = torch.ones_like(chunk.input_ids) if chunk.real is None else chunk.real.to(chunk.input_ids.dtype)
            given["attention_mask"] = real
        named = {name: value for name, value in given.items() if wanted is None or name in wanted}
        value = of_chunk(logits, chunk.labels, **named)
        return value if isinstance(value, Mapping) else {LOSS: value}

    def combined(sums: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        assert combine is not None
        given = _of_rows(by_row, microbatch)
        named = {name: value for name, value in given.items() if wanted_at_end is None or name in wanted_at_end}
        return combine(sums, **named)

    return SummedObjective(
        sums,
        None if combine is None else combined,
        by_token,
        by_row,
        rows_together,
        (_identity(of_chunk), _identity(combine), rows_together, tuple(sorted({*by_token, *by_row}))),
    )


def _cross_entropy(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor, loss_weights: Tensor | None = None
) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    if loss_weights is not None:
        losses = losses * loss_weights.flatten().to(losses.dtype)
    return losses.sum() / num_items_in_batch


def _num_items(batch: Mapping[str, Any], *, weighted: bool) -> Any:
    """What losses are divided by where it is not the number of supervised tokens; None where it is."""
    items, weights = batch.get("num_items_in_batch"), batch.get(WEIGHTS)
    if items is not None or weights is None or not weighted:
        return items
    supervised = shift_labels(batch["labels"])[:, :-1] != IGNORE_INDEX
    total = (weights[:, 1:] * supervised).sum()
    return torch.where(total == 0, torch.ones_like(total), total)


def _of_rows(tensors: Mapping[str, Tensor], microbatch: Microbatch) -> dict[str, Tensor]:
    return {name: tensor[list(microbatch.rows_of_batch)] for name, tensor in tensors.items()}


def _takes(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of a function's arguments; None if it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    positional_only = inspect.Parameter.POSITIONAL_ONLY
    return frozenset(parameter.name for parameter in parameters if parameter.kind is not positional_only)


def _identity(function: Any) -> Hashable:
    """Equal for two functions only if they compute the same; a function made anew in every step is the same one."""
    if isinstance(function, functools.partial):
        arguments = tuple(map(_identity, (*function.args, *function.keywords.values())))
        return _identity(function.func), tuple(function.keywords), arguments
    if inspect.isfunction(function):
        cells = tuple(_identity(cell.cell_contents) for cell in function.__closure__ or ())
        return function.__code__, cells, tuple(map(_identity, function.__defaults__ or ()))
    if isinstance(function, (Tensor, list, tuple, dict, set)):
        return str(type(function))
    return function if isinstance(function, Hashable) else str(type(function))
