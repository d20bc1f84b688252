"""Attention of one chunk's queries over the keys and values of its prefix and itself: the one door to all kernels."""

from __future__ import annotations

from torch import Tensor

from lightning_seq1f1b.ops.masked import masked_attention
from lightning_seq1f1b.ops.merged import DTYPES, merged_attention
from lightning_seq1f1b.ops.reference import reference_attention


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of a chunk over its prefix; the last query stands at the last key.

    What computes it is chosen by the arguments' kinds and shapes alone, never by their values.

    Args:
        query: [rows, heads, tokens, size].
        key: [rows, KV heads, keys, size]: the prefix, or the part of it that a window reaches, and the chunk; `heads`
            is a multiple of `KV heads`.
        value: [rows, KV heads, keys, value size].
        scale: factor on the scores; 1 / sqrt(size) by default.
        causal: whether a query sees the keys up to its own position only.
        window: with `causal`, how many keys a query sees at most, its own included; None for all.
        mask: boolean, broadcastable to [rows, heads, tokens, keys] and at least two-dimensional, true where a query
            sees a key.
        bias: added to the scores, broadcastable like `mask`.
        softcap: scores s become softcap tanh(s / softcap).
        sinks: [heads], scores of one more key per head, whose value is zero.
        dropout: probability of dropping an attention weight.

    Returns:
        [rows, heads, tokens, value size].

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    _check(query, key, value)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if window is not None and window >= key.shape[2]:
        window = None
    if softcap is not None or sinks is not None:
        return reference_attention(
            query,
            key,
            value,
            scale=scale,
            causal=causal,
            window=window,
            mask=mask,
            bias=bias,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
        )
    plain = causal and window is None and mask is None and bias is None and dropout == 0.0
    if plain and query.device.type == "cpu" and query.dtype in DTYPES and value.shape[-1] == query.shape[-1]:
        return merged_attention(query, key, value, scale)
    return masked_attention(
        query, key, value, scale=scale, causal=causal, window=window, mask=mask, bias=bias, dropout=dropout
    )


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"query, key and value are [rows, heads, tokens, size], not {shapes}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"query, key and value do not fit together: {shapes}")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} heads are no multiple of {key.shape[1]} KV heads: {shapes}")
    if key.shape[2] < query.shape[2]:
        raise ValueError(f"fewer keys than queries, though the chunk's own keys are among them: {shapes}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}")
