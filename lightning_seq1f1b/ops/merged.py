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

from lightning_seq1f1b.ops.attended import Attended
from lightning_seq1f1b.ops.options import Options

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of plain causal attention; as `ops.library` describes them.

    The prefix's key-value heads are not expanded.
    """
    rows, heads, tokens, _ = query.shape
    prefix, groups = key.shape[2] - tokens, heads // key.shape[1]
    output, lse = _flash(
        query,
        _expand(key[:, :, prefix:], groups),
        _expand(value[:, :, prefix:], groups),
        0.0,
        True,
        scale=options.scale,
    )
    if prefix > 0:
        before, before_lse = _flash(
            _fold(query, groups), key[:, :, :prefix], value[:, :, :prefix], 0.0, False, scale=options.scale
        )
        before, before_lse = before.reshape(query.shape), before_lse.reshape(rows, heads, tokens)
        weight = torch.sigmoid(lse - before_lse)[..., None]
        lse = torch.logaddexp(lse, before_lse)
        output = torch.lerp(before.to(weight.dtype), output.to(weight.dtype), weight).to(query.dtype)
    return output, lse


def backward(
    gradient: Tensor, attended: Attended, key_gradient: Tensor, value_gradient: Tensor, options: Options
) -> Tensor:
    """The query's gradient; adds to those of key and value. As `ops.library` describes it."""
    query, key, value, output, lse = attended
    rows, kv_heads, keys, _ = key.shape
    tokens, groups = query.shape[2], query.shape[1] // kv_heads
    prefix = keys - tokens
    query_gradient, own_key, own_value = _flash_backward(
        gradient,
        query,
        _expand(key[:, :, prefix:], groups),
        _expand(value[:, :, prefix:], groups),
        output,
        lse,
        0.0,
        True,
        scale=options.scale,
    )
    key_gradient[:, :, prefix:] += _contract(own_key, groups)
    value_gradient[:, :, prefix:] += _contract(own_value, groups)
    if prefix == 0:
        return query_gradient
    before_query, before_key, before_value = _flash_backward(
        _fold(gradient, groups),
        _fold(query, groups),
        key[:, :, :prefix],
        value[:, :, :prefix],
        _fold(output, groups),
        lse.reshape(rows, kv_heads, groups * tokens),
        0.0,
        False,
        scale=options.scale,
    )
    key_gradient[:, :, :prefix] += before_key
    value_gradient[:, :, :prefix] += before_value
    return query_gradient + before_query.reshape(query.shape)


def _expand(tensor: Tensor, groups: int) -> Tensor:
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _contract(tensor: Tensor, groups: int) -> Tensor:
    return tensor if groups == 1 else tensor.unflatten(1, (-1, groups)).sum(dim=2)


def _fold(tensor: Tensor, groups: int) -> Tensor:
    """Queries that share a key-value head become more queries of one head: allowed where no mask tells them apart."""
    rows, heads, tokens, size = tensor.shape
    return tensor if groups == 1 else tensor.reshape(rows, heads // groups, groups * tokens, size)
