"""Attention of one chunk's queries over the keys and values of its prefix and itself: the one door to all kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_seq1f1b.ops.kernel_attention import Accumulators, kernel_attention
from lightning_seq1f1b.ops.kernels import PLAIN, Call, choose, fast_kernels
from lightning_seq1f1b.ops.masked import masked_attention
from lightning_seq1f1b.ops.notice import say_once
from lightning_seq1f1b.ops.options import Options
from lightning_seq1f1b.ops.reference import reference_attention
from lightning_seq1f1b.ops.visibility import Visibility


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    visible: Visibility | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    accumulators: Accumulators | None = None,
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
        visible: with `causal`, which of these it sees; all by default.
        mask: boolean, broadcastable to [rows, heads, tokens, keys] and at least two-dimensional, true where a query
            sees a key.
        bias: added to the scores, broadcastable like `mask`.
        softcap: scores s become softcap tanh(s / softcap).
        sinks: [heads], scores of one more key per head, whose value is zero.
        dropout: probability of dropping an attention weight.
        accumulators: where the backward may add the gradients of key and value instead of giving them to autograd.

    Returns:
        [rows, heads, tokens, value size].

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit together.
    """
    visible = (visible or Visibility()) if causal else None
    _check(query, key, value, visible, softcap, sinks)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    call = None
    if visible is not None and mask is None and bias is None and dropout == 0.0:
        options = Options(scale, softcap, visible)
        call = Call(query.device, query.dtype, query.shape[3], value.shape[3], key.shape[2], options)
        kernel = choose(call)
        if kernel is not None:
            return kernel_attention(query, key, value, sinks, kernel, options, accumulators)
    _say_why(call, query.device.type)
    if softcap is None and sinks is None:
        return masked_attention(query, key, value, scale=scale, visible=visible, mask=mask, bias=bias, dropout=dropout)
    if call is not None:
        return kernel_attention(query, key, value, sinks, PLAIN, call.options, accumulators)
    return reference_attention(
        query,
        key,
        value,
        scale=scale,
        causal=causal,
        visible=visible,
        mask=mask,
        bias=bias,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
    )


def _say_why(call: Call | None, device_type: str) -> None:
    if device_type == "meta":
        return
    if call is None:
        why = "no kernel takes a mask or bias of the model's own, attention dropout, or queries that see later keys"
    else:
        lacking = [(kernel.name, kernel.lacks(call)) for kernel in fast_kernels(device_type)]
        why = "; ".join(f"{name}: {reason}" for name, reason in lacking) or f"no kernel for {device_type}"
    say_once(f"plain torch computes some attention of this model, exactly but slower and with more memory ({why})")


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visibility | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"query, key and value are [rows, heads, tokens, size], not {shapes}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"query, key and value do not fit together: {shapes}")
    if 0 in (*query.shape[1:], *key.shape[1:], value.shape[3]):
        raise ValueError(f"query, key and value must not be empty: {shapes}")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} heads are no multiple of {key.shape[1]} KV heads: {shapes}")
    if visible is not None and key.shape[2] < query.shape[2]:
        raise ValueError(f"fewer keys than queries, though the chunk's own keys are among them: {shapes}")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}")
    if not query.dtype.is_floating_point:
        raise ValueError(f"query, key and value are of a floating dtype, not {query.dtype}")
    if not query.device == key.device == value.device:
        raise ValueError(f"query, key and value lie on different devices: {query.device}, {key.device}, {value.device}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is positive, or None for no cap, not {softcap}")
    if sinks is not None:
        _check_sinks(sinks, query)
    if visible is not None:
        _check_visible(visible, query, key)


def _check_sinks(sinks: Tensor, query: Tensor) -> None:
    if sinks.shape != query.shape[1:2] or not sinks.dtype.is_floating_point or sinks.device != query.device:
        raise ValueError(
            f"sinks are one floating number a head, [{query.shape[1]}] on {query.device}, "
            f"not {list(sinks.shape)} {sinks.dtype} on {sinks.device}"
        )


def _check_visible(visible: Visibility, query: Tensor, key: Tensor) -> None:
    if visible.window is not None and visible.window < 1:
        raise ValueError(f"a window holds the query's own key at least, so 1 or more keys, not {visible.window}")
    for name, tensor, tokens, dtype in (
        ("first_key", visible.first_key, query.shape[2], torch.int32),
        ("key_mask", visible.key_mask, key.shape[2], torch.bool),
    ):
        if tensor is None:
            continue
        if tensor.shape != (query.shape[0], tokens) or tensor.dtype != dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} is {[query.shape[0], tokens]} {dtype} on {query.device}, "
                f"not {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )
