"""How much a step has to compute, counted without waiting for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_seq1f1b.runtime.batching import IGNORE_INDEX, shift_labels
from lightning_seq1f1b.runtime.documents import document_starts, padding_documents
from lightning_seq1f1b.runtime.row_groups import RowGroup
from lightning_seq1f1b.schedule.costs import Flops, ModelShape, flops_of_head, flops_of_layers


@dataclass(frozen=True)
class Load:
    """The work of one batch.

    Attributes:
        tokens: 0-d int64 on the batch's device: tokens that are no padding.
        supervised: 0-d int64: tokens that have a label, and so a part of the loss.
        flops: of the forward of all layers and the head, of the rows as they are computed: padding behind the longest
            row of a microbatch is not. Attention counts as causal over the row, also where it holds several documents.
    """

    tokens: Tensor
    supervised: Tensor
    flops: Flops

    @classmethod
    def of(cls, batch: Mapping[str, Tensor], groups: Sequence[RowGroup], shape: ModelShape) -> Load:
        """Count a batch.

        Args:
            batch: as for `runtime.batching.cut_groups`.
            groups: its microbatches.
            shape: the model's dimensions.
        """
        ids, labels = batch["input_ids"], batch.get("labels")
        none = torch.zeros((), dtype=torch.int64, device=ids.device)
        supervised = none if labels is None else (shift_labels(labels) != IGNORE_INDEX).sum()
        flops = sum((_flops_of_row(shape, group.length).times(len(group.rows)) for group in groups), Flops())
        return cls(_real(batch), supervised, flops)


@lru_cache(maxsize=4096)
def _flops_of_row(shape: ModelShape, length: int) -> Flops:
    return flops_of_layers(shape, range(shape.num_layers), 0, length) + flops_of_head(shape, 0, length)


def _real(batch: Mapping[str, Tensor]) -> Tensor:
    rows, length = batch["input_ids"].shape
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None:
        return mask.bool().sum()
    if positions is not None:
        # Without a mask, padding is documents of one token each at the end of a packed row.
        return (length - padding_documents(document_starts(positions)).expand(rows)).sum()
    return torch.full((), rows * length, dtype=torch.int64, device=batch["input_ids"].device)
