"""What the ops can be given, for those faces of them that are written in Python; the extension checks for itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATING = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Shapes that fit together; of symbolic sizes too."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must have four axes, but is of shape {list(tensor.shape)}")
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    torch._check_value(query.shape[0] == key.shape[0], lambda: f"query and key must have the same rows: {shapes}")
    torch._check_value(query.shape[3] == key.shape[3], lambda: f"query and key must have heads of one size: {shapes}")
    torch._check_value(query.shape[1] % key.shape[1] == 0, lambda: f"heads must be a multiple of KV heads: {shapes}")
    torch._check_value(key.shape[2] >= query.shape[2], lambda: f"keys must hold those of the queries: {shapes}")
    for dim in range(3):
        torch._check_value(key.shape[dim] == value.shape[dim], lambda: f"key and value must fit together: {shapes}")


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int,
    softcap: float,
    first_key: Tensor | None,
    key_mask: Tensor | None,
) -> None:
    """Everything `attend` is given; see `ops.library`.

    Raises:
        ValueError: something that does not fit.
    """
    check_shapes(query, key, value)
    if query.dtype not in FLOATING:
        raise ValueError(f"query must be of a floating dtype, but is {query.dtype}")
    rows, _, queries, _ = query.shape
    check_like("key", key, key.shape, query.dtype, query)
    check_like("value", value, value.shape, query.dtype, query)
    if first_key is not None:
        check_like("first_key", first_key, (rows, queries), torch.int32, query)
    if key_mask is not None:
        check_like("key_mask", key_mask, (rows, key.shape[2]), torch.bool, query)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, but is {scale}")
    if window < 0:
        raise ValueError(f"window must be at least 1, or 0 for none, but is {window}")
    if not (softcap >= 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap must be positive, or 0 for none, but is {softcap}")


def check_like(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> None:
    """A tensor of a shape and a dtype on the device of another.

    Raises:
        ValueError: it is not.
    """
    if tensor.shape != torch.Size(shape) or tensor.dtype != dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} on {like.device}, "
            f"but is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
