"""The slow twin: attention of a chunk over its prefix with every option, in plain steps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Boolean mask [queries, keys], true where a query sees a key; the last query stands at the last key."""
    position = torch.arange(keys - queries, keys, device=device)[:, None]
    key_position = torch.arange(keys, device=device)[None]
    mask = key_position <= position
    return mask if window is None else mask & (key_position > position - window)


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention by its definition; arguments and result as in `chunk_attention`.

    Scores are softmaxed in float32 at least. A query that sees no key attends to all keys equally, as it does in
    transformers; such rows are padding.
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
    lowest = torch.finfo(scores.dtype).min
    if causal:
        scores = scores.masked_fill(~causal_mask(queries, keys, window, query.device), lowest)
    if mask is not None:
        scores = scores.masked_fill(~mask, lowest)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(rows, heads, queries, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    weights = F.dropout(weights.to(value.dtype), dropout) if dropout else weights.to(value.dtype)
    output = weights.view(rows, kv_heads, heads // kv_heads * queries, keys) @ value
    return output.view(rows, heads, queries, value.shape[-1])
