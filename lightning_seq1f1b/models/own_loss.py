"""A numeric trial of a model's own loss function: whether what it gives for pieces adds up to what it gives for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_seq1f1b.runtime.batching import IGNORE_INDEX, shift_labels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LENGTH = 7
_PIECES = (
    (slice(0, 1), slice(0, 2)),
    (slice(0, 1), slice(2, 4)),  # nothing of it is supervised
    (slice(0, 1), slice(4, 7)),
    (slice(1, 2), slice(0, 5)),
    (slice(1, 2), slice(5, 7)),
)
"""Rows and tokens of the pieces of a trial, as microbatches and chunks cut a batch."""

_TOLERANCE = 1e-4


def check_loss_function(model: PreTrainedModel) -> None:
    """Refuse a model whose loss function is not shown to add up over chunks; transformers' own for causal LMs does.

    It is called with small random logits as the model calls it, on the model's device and without autograd.

    Raises:
        ValueError: it does not add up, is not divided by `num_items_in_batch`, is not the mean over the supervised
            tokens where that is left out, or does not return a scalar.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    function = model.loss_function
    if function is ForCausalLMLoss:
        return
    name = f"the loss_function of {type(model).__name__}, {getattr(function, '__qualname__', repr(function))},"
    try:
        reason = _reason(function, model)
    except Exception as error:
        raise ValueError(
            f"{name} could not be tried on small random logits, which must show that it adds up over chunks; it raised "
            f"{type(error).__name__}: {error}"
        ) from error
    if reason is not None:
        raise ValueError(
            f"{name} {reason}. To be summed over chunks it must be a sum over tokens divided by num_items_in_batch, "
            "which takes shift_labels as they are where they are given, and counts the supervised tokens where "
            "num_items_in_batch is None; for any other loss see lightning_seq1f1b.chunked_loss"
        )


def _reason(function: Callable[..., Any], model: PreTrainedModel) -> str | None:
    """Why the function can't be summed over chunks; None when it can."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    logits = torch.randn(2, _LENGTH, vocab_size, generator=generator).to(device)
    labels = torch.randint(vocab_size, (2, _LENGTH), generator=generator).to(device)
    labels[0, 3:5] = labels[1, 1] = IGNORE_INDEX
    shifted = shift_labels(labels)
    items = (shifted != IGNORE_INDEX).sum()

    def loss(rows: slice, tokens: slice, items: Tensor) -> Tensor:
        wanted = shifted[rows, tokens].contiguous()
        given = {"labels": wanted, "shift_labels": wanted, "num_items_in_batch": items}
        return _scalar(function(logits=logits[rows, tokens].contiguous(), vocab_size=vocab_size, **given))

    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), torch.autocast(device.type, enabled=False):
        whole = loss(slice(None), slice(None), items)
        pieces = torch.stack([loss(rows, tokens, items) for rows, tokens in _PIECES])
        halved = loss(slice(None), slice(None), 2 * items)
        alone = _scalar(function(logits=logits, labels=labels, vocab_size=vocab_size))
    if not _close(pieces.sum(), whole):
        return (
            f"does not add up over chunks: on random logits it gave {float(whole):.5g} for all tokens, but "
            f"{' + '.join(f'{float(piece):.5g}' for piece in pieces)} = {float(pieces.sum()):.5g} for their parts"
        )
    if not _close(2 * halved, whole):
        return (
            "is not divided by num_items_in_batch: on random logits twice as many items gave "
            f"{float(halved):.5g} instead of half of {float(whole):.5g}"
        )
    if not _close(alone, whole):
        return (
            "is not the mean over the supervised tokens where num_items_in_batch is None: on random logits it gave "
            f"{float(alone):.5g} instead of {float(whole):.5g}"
        )
    return None


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"it returned {kind}, not a scalar tensor")
    return loss.detach().double().reshape(())


def _close(one: Tensor, other: Tensor) -> bool:
    return bool(torch.isclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE))
