"""Attention by torch's own `scaled_dot_product_attention`, with a mask where it needs one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from lightning_seq1f1b.ops.visibility import Visibility


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    visible: Visibility | None,
    mask: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention with a mask; arguments and result as in `chunk_attention`."""
    queries, keys = query.shape[2], key.shape[2]
    allowed = mask
    if visible is not None:
        plain = visible.plain(keys) and mask is None and bias is None and query.device.type != "cpu"
        if plain:
            # Accelerators' flash kernels align this at the bottom right without a mask in memory.
            allowed = causal_lower_right(queries, keys)
        else:
            dense = visible.dense(queries, keys, query.device)
            allowed = dense if mask is None else dense & mask
    if bias is not None:
        bias = bias.to(query.dtype)
        allowed = bias if allowed is None else torch.where(allowed, bias, float("-inf"))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=allowed,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
