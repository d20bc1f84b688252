"""Attention by torch's own `scaled_dot_product_attention`, with a mask where it needs one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from lightning_seq1f1b.ops.reference import causal_mask


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    mask: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention with a mask; arguments and result as in `chunk_attention`."""
    queries, keys = query.shape[2], key.shape[2]
    allowed = mask
    if causal and (window is not None or mask is not None or bias is not None or query.device.type == "cpu"):
        allowed = causal_mask(queries, keys, window, query.device)
        if mask is not None:
            allowed = allowed & mask
    elif causal:
        # Accelerators' flash kernels align this at the bottom right without a mask in memory.
        allowed = causal_lower_right(queries, keys)
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
