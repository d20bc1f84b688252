"""Autograd around a kernel: gradients of keys and values go straight into accumulators where there are some."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_seq1f1b.ops.attended import Attended
from lightning_seq1f1b.ops.kernels import Kernel
from lightning_seq1f1b.ops.layout import unit_stride
from lightning_seq1f1b.ops.once import refuse_second_derivatives
from lightning_seq1f1b.ops.options import Options


class Accumulators(Protocol):
    """Where the gradients of keys and values are collected from several chunks."""

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Those of the keys and of the values that attention was given, float32 at least, to be added to."""


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    kernel: Kernel,
    options: Options,
    accumulators: Accumulators | None,
) -> Tensor:
    """Attention by a kernel.

    Saves its inputs, the output and one number a query for the backward.

    Args:
        query: [rows, heads, tokens, size], of a dtype and on a device that the kernel computes, as `choose` asks it.
        key: [rows, KV heads, keys, size].
        value: [rows, KV heads, keys, value size].
        sinks: [heads], scores of one more key per head, whose value is zero.
        kernel: what computes it.
        options: how scores come about.
        accumulators: where the backward adds the gradients of key and value; autograd then gets none for them. None:
            autograd gets them.

    Returns:
        [rows, heads, tokens, value size].
    """
    return _KernelAttention.apply(query, key, value, sinks, kernel, options, accumulators)


class _KernelAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        kernel: Kernel,
        options: Options,
        accumulators: Accumulators | None,
    ) -> Tensor:
        query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
        output, lse = kernel.forward(query, key, value, options)
        if sinks is not None:
            output, lse = _with_sinks(output, lse, sinks)
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.kernel, ctx.options, ctx.accumulators = kernel, options, accumulators
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("attention by a kernel")
        query, key, value, sinks, output, lse = ctx.saved_tensors
        if ctx.accumulators is None:
            key_gradient, value_gradient = _zeros(key), _zeros(value)
        else:
            key_gradient, value_gradient = ctx.accumulators.gradients()
        query_gradient = ctx.kernel.backward(
            unit_stride(gradient),
            Attended(query, key, value, output, lse),
            key_gradient,
            value_gradient,
            ctx.options,
        )
        sinks_gradient = None
        if sinks is not None and ctx.needs_input_grad[3]:
            sinks_gradient = _sinks_gradient(gradient, output, lse, sinks)
        if ctx.accumulators is not None:
            return query_gradient, None, None, sinks_gradient, None, None, None
        _, wants_key, wants_value, *_ = ctx.needs_input_grad
        own_key = key_gradient.to(key.dtype) if wants_key else None
        own_value = value_gradient.to(value.dtype) if wants_value else None
        return query_gradient, own_key, own_value, sinks_gradient, None, None, None


def _with_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Merge a further key of value zero: it takes weight from the others and adds nothing.

    The backward of every kernel is then exact with the merged output and log-sum-exp in place of its own.
    """
    sink = sinks.to(lse.dtype)[:, None]
    merged = torch.logaddexp(lse, sink)
    # A query that sees no key keeps its lse of +infinity, and its output of zero.
    kept = torch.exp((lse - merged).nan_to_num(nan=0.0))
    return (output * kept[..., None]).to(output.dtype), merged


def _sinks_gradient(gradient: Tensor, output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """With p the sink's weight and a value of zero, ds = p (0 - rowsum(g o))."""
    delta = torch.linalg.vecdot(gradient.to(lse.dtype), output.to(lse.dtype))
    weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -(weight * delta).sum((0, 2)).to(sinks.dtype)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), device=tensor.device)
