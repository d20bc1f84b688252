"""Errors against float64, chunk by chunk through the KV buffer, next to those of torch on the whole sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.attention_cases import inputs
from torch import Tensor

from lightning_seq1f1b.ops import native
from lightning_seq1f1b.ops.attention import chunk_attention
from lightning_seq1f1b.runtime.kv_buffer import KVBuffer, appended
from lightning_seq1f1b.schedule.partition import even

LENGTH, SIZE = 1024, 64
LIMITS = {torch.float32: 1.5, torch.bfloat16: 1.0}
"""Of torch's errors; in bfloat16 the float32 accumulators must win."""


def whole(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> list[Tensor]:
    """Torch's attention: output and gradients of query, key, value."""
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    output = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
    output.backward(gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def chunked(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, chunks: int) -> list[Tensor]:
    """The same by chunks."""
    buffer, outputs, leaves = KVBuffer(LENGTH), [], []
    spans = [slice(span.start, span.stop) for span in even(LENGTH, chunks)]
    for span in spans:
        own = [tensor[:, :, span].detach().requires_grad_() for tensor in (query, key, value)]
        keys, values = buffer.append(span.start, 0, own[1], own[2])
        outputs.append(chunk_attention(own[0], keys, values, accumulators=appended(keys, values)))
        leaves.append(own)
    for output, span in zip(reversed(outputs), reversed(spans), strict=True):
        output.backward(gradient[:, :, span])
    gradients = (torch.cat([own[index].grad for own in leaves], 2) for index in range(3))
    return [torch.cat(outputs, 2).detach(), *gradients]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_errors_are_at_most_those_of_torch(dtype: torch.dtype, kv_heads: int) -> None:
    """Three draws together, so that a tie is decided by the kernels and not by luck."""
    assert native.available(), native.reason()
    errors: dict[int, list[float]] = {chunks: [0.0] * 4 for chunks in (0, 1, 4, 16)}
    for seed in range(3):
        tensors = [
            tensor.detach()
            for tensor in inputs(LENGTH, LENGTH, rows=1, heads=8, kv_heads=kv_heads, size=SIZE, seed=seed)
        ]
        gradient = inputs(LENGTH, LENGTH, rows=1, heads=8, kv_heads=8, size=SIZE, seed=seed + 100)[0].detach()
        given = [tensor.to(dtype) for tensor in (*tensors, gradient)]
        truth = whole(*(tensor.double() for tensor in given))
        for chunks, sums in errors.items():
            got = chunked(*given, chunks) if chunks else whole(*given)
            for index, (actual, wanted) in enumerate(zip(got, truth, strict=True)):
                sums[index] += float((actual.double() - wanted).square().sum() / wanted.square().sum())
    for chunks in (1, 4, 16):
        ratios = [(ours / theirs) ** 0.5 for ours, theirs in zip(errors[chunks], errors[0], strict=True)]
        named = dict(zip(("output", "query", "key", "value"), ratios, strict=True))
        assert max(ratios) <= LIMITS[dtype], f"{chunks} chunks: {named}"
