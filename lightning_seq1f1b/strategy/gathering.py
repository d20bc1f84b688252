"""Brings named tensors of all stages to the pipeline's first rank, one tensor at a time, on the CPU."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


def gather_to_first(values: Mapping[Key, Any], group: dist.ProcessGroup, ranks: Sequence[int]) -> dict[Key, Any] | None:
    """Collect every rank's entries on the first rank.

    Tensors travel one after the other over the CPU group, so that no accelerator and no message holds the whole model.

    Args:
        values: this rank's entries; tensors, or anything small that pickles. No key may occur on two ranks.
        group: a gloo group of the pipeline's processes.
        ranks: their global ranks, by pipeline rank.

    Returns:
        All entries, tensors on the CPU, on the first rank; None elsewhere.
    """
    rank, first = dist.get_rank(), ranks[0]
    tensors = {key: value.detach() for key, value in values.items() if isinstance(value, Tensor)}
    others = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
    described = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()]
    announced: list[Any] | None = [None] * len(ranks) if rank == first else None
    dist.gather_object((described, others), announced, dst=first, group=group)
    if rank != first:
        for tensor in tensors.values():
            dist.send(tensor.cpu().contiguous(), first, group=group)
        return None
    assert announced is not None
    merged: dict[Key, Any] = {**others, **{key: tensor.cpu() for key, tensor in tensors.items()}}
    for source, (descriptions, small) in zip(ranks[1:], announced[1:], strict=True):
        merged.update(small)
        for key, shape, dtype in descriptions:
            merged[key] = torch.empty(shape, dtype=dtype)
            dist.recv(merged[key], source, group=group)
    return merged
