"""Causal attention on the CPU as two parts, each by torch's flash kernel, merged by their log-sum-exps.

Queries of a chunk see all of the prefix, so that part needs no mask, and the chunk itself through an ordinary causal
square. With o, l the output and log-sum-exp of each part,

    l = log(exp(l_prefix) + exp(l_chunk)),    o = o_prefix exp(l_prefix - l) + o_chunk exp(l_chunk - l)

(Rabe and Staats 2021, Dao et al. 2022). The kernel's backward takes the merged o and l in place of its own, which makes
it exact for each part.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
"""What the kernel computes in."""


def merged_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention, bottom-right aligned, without a mask and without expanding the prefix's key-value heads.

    Saves its inputs, the output and one number a query for the backward.

    Args:
        query: [rows, heads, tokens, size], on the CPU, of one of `DTYPES`.
        key: [rows, KV heads, keys, size].
        value: [rows, KV heads, keys, size].
        scale: factor on the scores.

    Returns:
        [rows, heads, tokens, size].
    """
    return _MergedAttention.apply(query, key, value, scale)


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        query, key, value = _unit_stride(query), _unit_stride(key), _unit_stride(value)
        rows, heads, tokens, _ = query.shape
        prefix, groups = key.shape[2] - tokens, heads // key.shape[1]
        output, lse = _flash(
            query, _expand(key[:, :, prefix:], groups), _expand(value[:, :, prefix:], groups), 0.0, True, scale=scale
        )
        if prefix > 0:
            before, before_lse = _flash(
                _fold(query, groups), key[:, :, :prefix], value[:, :, :prefix], 0.0, False, scale=scale
            )
            before, before_lse = before.reshape(query.shape), before_lse.reshape(rows, heads, tokens)
            weight = torch.sigmoid(lse - before_lse)[..., None]
            lse = torch.logaddexp(lse, before_lse)
            output = torch.lerp(before.to(weight.dtype), output.to(weight.dtype), weight).to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        query, key, value, output, lse = ctx.saved_tensors
        gradient = _unit_stride(gradient)
        rows, kv_heads, keys, _ = key.shape
        tokens, groups = query.shape[2], query.shape[1] // kv_heads
        prefix = keys - tokens
        own_query, own_key, own_value = _flash_backward(
            gradient,
            query,
            _expand(key[:, :, prefix:], groups),
            _expand(value[:, :, prefix:], groups),
            output,
            lse,
            0.0,
            True,
            scale=ctx.scale,
        )
        own_key, own_value = _contract(own_key, groups), _contract(own_value, groups)
        if prefix == 0:
            return own_query, own_key, own_value, None
        before_query, before_key, before_value = _flash_backward(
            _fold(gradient, groups),
            _fold(query, groups),
            key[:, :, :prefix],
            value[:, :, :prefix],
            _fold(output, groups),
            lse.reshape(rows, kv_heads, groups * tokens),
            0.0,
            False,
            scale=ctx.scale,
        )
        return (
            own_query + before_query.reshape(query.shape),
            torch.cat([before_key, own_key], dim=2),
            torch.cat([before_value, own_value], dim=2),
            None,
        )


def _unit_stride(tensor: Tensor) -> Tensor:
    # The kernel reads rows as if their entries were adjacent, and does not check.
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _expand(tensor: Tensor, groups: int) -> Tensor:
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _contract(tensor: Tensor, groups: int) -> Tensor:
    return tensor if groups == 1 else tensor.unflatten(1, (-1, groups)).sum(dim=2)


def _fold(tensor: Tensor, groups: int) -> Tensor:
    """Queries that share a key-value head become more queries of one head: allowed where no mask tells them apart."""
    rows, heads, tokens, size = tensor.shape
    return tensor if groups == 1 else tensor.reshape(rows, heads // groups, groups * tokens, size)
