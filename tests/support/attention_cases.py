"""Inputs of attention, and the definition of attention written out once more, slowly."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_seq1f1b.ops.reference import reference_attention


def inputs(
    tokens: int,
    keys: int,
    *,
    rows: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 8,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key, value that want gradients; laid out in memory as layers make them, heads inside tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int, length: int, width: int) -> Tensor:
        drawn = torch.randn(rows, length, count, width, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).transpose(1, 2).requires_grad_()

    return draw(heads, tokens, size), draw(kv_heads, keys, size), draw(kv_heads, keys, value_size or size)


def by_loops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    window: int | None = None,
    first_key: Tensor | None = None,
    key_mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention, one query of one head at a time, without autograd and in float64."""
    rows, heads, tokens, _ = query.shape
    group, prefix = heads // key.shape[1], key.shape[2] - tokens
    output = torch.zeros(rows, heads, tokens, value.shape[-1], dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            for token in range(tokens):
                first = 0 if window is None else max(0, prefix + token - window + 1)
                first = first if first_key is None else max(first, int(first_key[row, token]))
                seen = [at for at in range(first, prefix + token + 1) if key_mask is None or key_mask[row, at]]
                scores = [float(query[row, head, token] @ key[row, head // group, at]) * scale for at in seen]
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                sink = [] if sinks is None else [float(sinks[head])]
                total = sum(math.exp(score) for score in scores + sink)
                for at, score in zip(seen, scores, strict=True):
                    output[row, head, token] += math.exp(score) / total * value[row, head // group, at]
    return output


def with_gradients(compute: Callable[[], Tensor], *tensors: Tensor) -> list[Tensor]:
    """The output, and the gradients of a fixed random projection of it."""
    output = compute()
    projection = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output, *torch.autograd.grad((output * projection.to(output.dtype)).sum(), tensors)]


def assert_twins(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tolerance: float = 1e-12,
    **options: object,
) -> None:
    """An attention equals its slow twin, output and gradients."""
    tensors = (query, key, value)
    got = with_gradients(lambda: attention(*tensors, scale=0.3, **options), *tensors)
    expected = with_gradients(lambda: reference_attention(*tensors, scale=0.3, **options), *tensors)
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=tolerance)
