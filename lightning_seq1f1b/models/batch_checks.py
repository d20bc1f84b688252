"""Checks of what `model(...)` is called with, made on every rank before anything is sent or computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_seq1f1b.models.packing import ANY_PACKED, BORDERS, PackedRows
from lightning_seq1f1b.runtime.batching import IGNORE_INDEX

ACCEPTED = ("input_ids", "labels", "attention_mask", "position_ids", "num_items_in_batch")
"""Arguments of a model that is cut into stages."""

_WITHOUT_EFFECT = ("use_cache", "return_dict")


def checked_batch(
    arguments: Mapping[str, Any],
    max_length: int | None,
    *,
    labels_needed: bool = True,
    packed: PackedRows = ANY_PACKED,
) -> dict[str, Tensor]:
    """The batch among a call's arguments.

    Args:
        arguments: all arguments of the call, by name.
        max_length: tokens that the model has positions for, None without a limit.
        labels_needed: whether a batch without labels is an error.
        packed: which rows packed with several documents the model can compute.

    Returns:
        Those of `ACCEPTED` that were given, as tensors; tokens and labels in int64.

    Raises:
        ValueError: an argument is not accepted, is missing, has the wrong shape or kind, or asks for what stages and
            chunks cannot compute.
    """
    for name, value in arguments.items():
        if name not in (*ACCEPTED, *BORDERS, *_WITHOUT_EFFECT) and value is not None and value is not False:
            raise ValueError(f"a model cut into pipeline stages does not take {name!r}; it takes {', '.join(ACCEPTED)}")
    batch = {name: torch.as_tensor(arguments[name]) for name in ACCEPTED if arguments.get(name) is not None}
    _check_tokens(batch)
    if labels_needed or "labels" in batch:
        _check_labels(batch)
    _check_mask(batch)
    _check_positions(batch)
    _check_length(batch, max_length)
    packed.check(batch, {name: arguments[name] for name in BORDERS if arguments.get(name) is not None})
    if "num_items_in_batch" in batch:
        if batch["num_items_in_batch"].numel() != 1:
            shape = list(batch["num_items_in_batch"].shape)
            raise ValueError(f"num_items_in_batch is one number, not a tensor of shape {shape}")
        batch["num_items_in_batch"] = batch["num_items_in_batch"].reshape(())
    return {**batch, **{name: batch[name].long() for name in ("input_ids", "labels") if name in batch}}


def _check_tokens(batch: Mapping[str, Tensor]) -> None:
    input_ids = batch.get("input_ids")
    if input_ids is None:
        raise ValueError("a batch without input_ids; the first stage embeds tokens itself")
    if input_ids.ndim != 2 or input_ids.is_floating_point() or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids are whole numbers in the shape [rows, length], not {input_ids.dtype} {list(input_ids.shape)}"
        )


def _check_labels(batch: Mapping[str, Tensor]) -> None:
    labels = batch.get("labels")
    if labels is None:
        raise ValueError(
            "a batch without labels: a model cut into pipeline stages returns only its loss, in evaluation too. Add "
            f"labels of the shape of input_ids, {IGNORE_INDEX} where a token is not to be learned; for logits in "
            "evaluation, pass Seq1F1BStrategy(evaluation_logits=True)"
        )
    if labels.is_floating_point():
        raise ValueError(f"labels are whole numbers, not {labels.dtype}")
    if labels.shape != batch["input_ids"].shape:
        raise ValueError(
            f"labels have the shape {list(labels.shape)}, input_ids {list(batch['input_ids'].shape)}; they must agree "
            "(labels are shifted inside)"
        )


def _check_mask(batch: Mapping[str, Tensor]) -> None:
    mask = batch.get("attention_mask")
    if mask is None:
        return
    if mask.shape != batch["input_ids"].shape:
        raise ValueError(
            f"attention_mask has the shape {list(mask.shape)}, input_ids {list(batch['input_ids'].shape)}; a mask of "
            "padding, 1 for every real token, must have the same"
        )
    if "labels" not in batch:
        return
    supervised = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX) != IGNORE_INDEX
    sees_nothing = mask.bool().cumsum(dim=1) == 0
    if bool((supervised & sees_nothing).any()):
        raise ValueError(
            "a row is padded at the left and its first real token has a label: it would be predicted from padding, "
            f"which has no defined value. Set the labels of padding and of the first real token to {IGNORE_INDEX}"
        )


def _check_positions(batch: Mapping[str, Tensor]) -> None:
    positions = batch.get("position_ids")
    if positions is None:
        return
    rows, length = batch["input_ids"].shape
    if positions.ndim != 2 or positions.shape[0] not in (1, rows) or positions.shape[1] != length:
        raise ValueError(
            f"position_ids have the shape {list(positions.shape)}, input_ids [{rows}, {length}]; they must have the "
            "same, or one row for all"
        )


def _check_length(batch: Mapping[str, Tensor], max_length: int | None) -> None:
    """Of the longest document, where positions restart."""
    if max_length is None:
        return
    length = int(batch["position_ids"].max()) + 1 if "position_ids" in batch else batch["input_ids"].shape[1]
    if length > max_length:
        raise ValueError(
            f"rows of {length} tokens, but the model has positions for {max_length} "
            "(config.max_position_embeddings); cut the rows shorter"
        )
