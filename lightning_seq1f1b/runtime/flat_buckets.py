"""Packs tensors into few flat ones, so that a collective costs one launch for many of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 25 * 2**20
"""As DistributedDataParallel's: large enough for a link's full speed, small enough for the first to leave early."""


class FlatBucket:
    """Some tensors of one dtype and device, and how they lie one behind the other in a flat one.

    Args:
        tensors: at least one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def filled(self) -> Tensor:
        """The values in a new flat tensor; a lone contiguous tensor is not copied but seen flat."""
        if len(self.tensors) == 1:
            return self.tensors[0].detach().reshape(-1)
        return torch.cat([tensor.detach().reshape(-1) for tensor in self.tensors])

    def empty(self) -> Tensor:
        """A flat tensor of the same size, to receive into; that of a lone contiguous tensor is its own memory."""
        first = self.tensors[0].detach()
        if len(self.tensors) == 1 and first.is_contiguous():
            return first.view(-1)
        return first.new_empty(sum(tensor.numel() for tensor in self.tensors))

    def copy_out(self, flat: Tensor) -> None:
        """Write a flat tensor's values into the tensors."""
        pieces = torch.split(flat, [tensor.numel() for tensor in self.tensors])
        for tensor, piece in zip(self.tensors, pieces, strict=True):
            if tensor.data_ptr() != piece.data_ptr():
                tensor.detach().copy_(piece.view(tensor.shape))


def flat_buckets(tensors: Sequence[Tensor], size: int = BUCKET_BYTES) -> Iterator[FlatBucket]:
    """Tensors in buckets, in their order but for those of other dtypes or devices, which have buckets of their own.

    Args:
        tensors: any.
        size: bytes that a bucket may hold; a larger tensor has one of its own.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        bucket = open_buckets.setdefault(kind, [])
        if bucket and sum(map(_bytes, bucket)) + _bytes(tensor) > size:
            yield FlatBucket(bucket)
            bucket = open_buckets[kind] = []
        bucket.append(tensor)
    yield from (FlatBucket(bucket) for bucket in open_buckets.values() if bucket)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
