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

from lightning_seq1f1b.ops.attended import Attended
from lightning_seq1f1b.ops.options import Options

BLOCK = 256
"""Queries whose scores are in memory at once."""


def forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; as `ops.library` describes them."""
    rows, heads, queries, _ = query.shape
    output = query.new_empty(rows, queries, heads, value.shape[3]).transpose(1, 2)
    lse = query.new_empty(rows, heads, queries, dtype=torch.promote_types(query.dtype, torch.float32))
    # Autocast would compute the products in lower precision than here, and not in the backward, which repeats them.
    with torch.autocast(query.device.type, enabled=False):
        for block in _blocks(query, key, options):
            block_lse = block.scores.logsumexp(-1, keepdim=True)
            block_lse = block_lse.masked_fill(block_lse == float("-inf"), float("inf"))
            weights = torch.exp(block.scores - block_lse)
            output[:, :, block.tokens] = block.ungroup(weights @ block.keys_of(value))
            lse[:, :, block.tokens] = block.ungroup(block_lse)[..., 0]
    return output, lse


def backward(
    gradient: Tensor, attended: Attended, key_gradient: Tensor, value_gradient: Tensor, options: Options
) -> Tensor:
    """The query's gradient; adds to those of key and value. As `ops.library` describes it."""
    query, key, value, output, lse = attended
    rows, heads, queries, size = query.shape
    query_gradient = query.new_empty(rows, queries, heads, size).transpose(1, 2)
    for block in _blocks(query, key, options):
        g = block.group(gradient)
        weights = torch.exp(block.scores - block.group(lse[..., None]))
        delta = (g * block.group(output)).sum(-1, keepdim=True)
        d_scores = weights * (g @ block.keys_of(value).mT - delta)
        if options.softcap is not None:
            seen = block.scores.masked_fill(block.scores == float("-inf"), 0)
            d_scores = d_scores * (1 - (seen / options.softcap) ** 2)
        d_scores = d_scores * options.scale
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
    groups: int
    scores: Tensor

    def group(self, tensor: Tensor) -> Tensor:
        part = tensor[:, :, self.tokens].to(self.scores.dtype)
        return part.unflatten(1, (self.kv_heads, self.groups)).flatten(2, 3)

    def ungroup(self, tensor: Tensor) -> Tensor:
        tokens = self.tokens.stop - self.tokens.start
        return tensor.unflatten(2, (self.groups, tokens)).flatten(1, 2)

    def keys_of(self, tensor: Tensor) -> Tensor:
        return tensor[:, :, self.seen].to(self.scores.dtype)


def _blocks(query: Tensor, key: Tensor, options: Options) -> Iterator[_Block]:
    rows, heads, queries, size = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    dtype = torch.promote_types(query.dtype, torch.float32)
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        last, window = keys - queries + stop, options.visible.window
        seen = slice(0 if window is None else max(0, keys - queries + start - window + 1), last)
        grouped = query[:, :, start:stop].to(dtype).reshape(rows, kv_heads, groups * (stop - start), size)
        scores = grouped @ key[:, :, seen].to(dtype).mT * options.scale
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        mask = options.visible.part(queries, keys, start, stop, query.device)[:, :, None, :, seen]
        scores = scores.unflatten(2, (groups, stop - start)).masked_fill(~mask, float("-inf")).flatten(2, 3)
        yield _Block(slice(start, stop), seen, kv_heads, groups, scores)
