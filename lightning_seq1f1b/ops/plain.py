"""Forward and backward of attention in plain steps of torch, with every option of the kernels, a few queries at a time.

With s the scores, l their log-sum-exp, o the output and g its gradient (Dao et al. 2022):

    p = exp(s - l),  o = p v,  dv = p^T g,  ds = p (g v^T - rowsum(g o)),  dq = scale ds k,  dk = scale ds^T q

and with a soft-cap c, ds is multiplied by 1 - (s / c)^2. A query that sees no key has l = +infinity, hence p = 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_seq1f1b.ops.scores import Scores

BLOCK = 256
"""Queries whose scores are in memory at once."""


def forward(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; as `ops.library` describes them."""
    rows, heads, queries, _ = query.shape
    output = query.new_empty(rows, queries, heads, value.shape[3]).transpose(1, 2)
    lse = query.new_empty(rows, heads, queries, dtype=torch.promote_types(query.dtype, torch.float32))
    for block in _blocks(query, key, scores):
        block_lse = block.scores.logsumexp(-1, keepdim=True)
        block_lse = block_lse.masked_fill(block_lse == float("-inf"), float("inf"))
        weights = torch.exp(block.scores - block_lse)
        output[:, :, block.tokens] = block.ungroup(weights @ block.keys_of(value))
        lse[:, :, block.tokens] = block.ungroup(block_lse)[..., 0]
    return output, lse


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    key_gradient: Tensor,
    value_gradient: Tensor,
    scores: Scores,
) -> Tensor:
    """The query's gradient; adds to those of key and value. As `ops.library` describes it."""
    rows, heads, queries, size = query.shape
    query_gradient = query.new_empty(rows, queries, heads, size).transpose(1, 2)
    for block in _blocks(query, key, scores):
        g = block.group(gradient)
        weights = torch.exp(block.scores - block.group(lse[..., None]))
        delta = (g * block.group(output)).sum(-1, keepdim=True)
        d_scores = weights * (g @ block.keys_of(value).mT - delta)
        if scores.softcap is not None:
            seen = block.scores.masked_fill(block.scores == float("-inf"), 0)
            d_scores = d_scores * (1 - (seen / scores.softcap) ** 2)
        d_scores = d_scores * scores.scale
        query_gradient[:, :, block.tokens] = block.ungroup(d_scores @ block.keys_of(key))
        key_gradient[:, :, block.seen] += d_scores.mT @ block.group(query)
        value_gradient[:, :, block.seen] += weights.mT @ g
    return query_gradient


@dataclass(frozen=True, eq=False)
class _Block:
    """Some queries. Those that share a key-value head are put together: [rows, KV heads, groups x tokens, ...].

    `scores` is [rows, KV heads, groups x tokens, keys seen].
    """

    tokens: slice
    seen: slice
    kv_heads: int
    scores: Tensor

    def group(self, tensor: Tensor) -> Tensor:
        part = tensor[:, :, self.tokens].to(self.scores.dtype)
        return part.reshape(part.shape[0], self.kv_heads, -1, part.shape[3])

    def ungroup(self, tensor: Tensor) -> Tensor:
        tokens = self.tokens.stop - self.tokens.start
        return tensor.reshape(tensor.shape[0], -1, tokens, tensor.shape[3])

    def keys_of(self, tensor: Tensor) -> Tensor:
        return tensor[:, :, self.seen].to(self.scores.dtype)


def _blocks(query: Tensor, key: Tensor, scores: Scores) -> Iterator[_Block]:
    rows, heads, queries, size = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        last, window = keys - queries + stop, scores.visible.window
        seen = slice(0 if window is None else max(0, keys - queries + start - window + 1), last)
        grouped = query[:, :, start:stop].to(dtype).reshape(rows, kv_heads, -1, size)
        values = grouped @ key[:, :, seen].to(dtype).mT * scores.scale
        if scores.softcap is not None:
            values = torch.tanh(values / scores.softcap) * scores.softcap
        mask = scores.visible.part(queries, keys, start, stop, query.device)[:, :, None, :, seen]
        values = values.view(rows, kv_heads, heads // kv_heads, stop - start, -1).masked_fill(~mask, float("-inf"))
        yield _Block(slice(start, stop), seen, kv_heads, values.view(rows, kv_heads, -1, values.shape[-1]))
