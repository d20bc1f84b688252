"""The slow twin: attention of a chunk over its prefix with every option, in plain steps that autograd follows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_seq1f1b.ops.visibility import Visibility


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = True,
    visible: Visibility | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention by its definition; arguments and result as in `chunk_attention`.

    Scores are softmaxed in float32 at least. The output of a query that sees no key is zero.
    """
    rows, heads, queries, size = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads * queries, size)
    scores = (grouped @ key.transpose(-1, -2)).view(rows, heads, queries, keys) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    # The lowest number instead of -infinity: a query that sees nothing gets finite weights, which are taken away below.
    lowest = torch.finfo(scores.dtype).min
    seen = mask
    if causal:
        dense = (visible or Visibility()).dense(queries, keys, query.device)
        seen = dense if mask is None else dense & mask
    if seen is not None:
        scores = scores.masked_fill(~seen, lowest)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(rows, heads, queries, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    if seen is not None:
        weights = weights.masked_fill(~seen, 0)
    weights = F.dropout(weights.to(value.dtype), dropout) if dropout else weights.to(value.dtype)
    output = weights.view(rows, kv_heads, heads // kv_heads * queries, keys) @ value
    return output.view(rows, heads, queries, value.shape[-1])
