"""The ops, as torch knows them: `torch.ops.lightning_seq1f1b.*`, with schema, meta kernel and autograd.

Defined here for every device by plain steps of torch; the extension adds native kernels for the CPU and CUDA to the
same ops, so that nothing that calls them has to know whether it was built.

- attend(query, key, value, scale, window, softcap, first_key, key_mask) -> (output, lse): attention of a chunk's
  queries over the keys and values of its prefix and itself. query [rows, heads, queries, size]; key [rows, KV heads,
  keys, size] and value [rows, KV heads, keys, value size], where `heads` is a multiple of `KV heads` and `keys` at
  least `queries`. The last query stands at the last key. `window` 0 and `softcap` 0.0 stand for none; first_key [rows,
  queries] int32 and key_mask [rows, keys] bool are described in `ops.visibility`. output [rows, heads, queries, value
  size], in memory with heads inside tokens, as layers want it. lse [rows, heads, queries], float32 (float64 for
  float64): log-sum-exp of the scores; +infinity for a query that sees no key, whose output is zero. Differentiable in
  query, key and value.
- attend_backward(gradient, query, key, value, output, lse, key_gradient, value_gradient, ...) -> query gradient, in
  memory like the output. Adds to key_gradient and value_gradient, in place; float32 (float64 for float64), shaped like
  key and value. `lse` and `output` may have been merged with further terms, such as sinks.
- append(buffer, chunk, start): buffer[:, :, start : start + tokens] = chunk, both [rows, heads, tokens, size].
- accumulate(total, part): total += part, where `total` is float32 or float64 and `part` of any floating dtype.

All tensors' last strides are 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_seq1f1b.ops import native, plain
from lightning_seq1f1b.ops.scores import Scores
from lightning_seq1f1b.ops.visibility import Visibility

NAMESPACE = "lightning_seq1f1b"

_OPTIONS = "float scale, int window, float softcap, Tensor? first_key, Tensor? key_mask"
_SCHEMAS = {
    "attend": f"(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor, Tensor)",
    "attend_backward": "(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, "
    f"Tensor(a!) key_gradient, Tensor(b!) value_gradient, {_OPTIONS}) -> Tensor",
    "append": "(Tensor(a!) buffer, Tensor chunk, int start) -> ()",
    "accumulate": "(Tensor(a!) total, Tensor part) -> ()",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"{NAMESPACE}::{_name}", _schema, tags=torch.Tag.pt2_compliant_tag)

_ops = getattr(torch.ops, NAMESPACE)
attend, attend_backward, append, accumulate = (getattr(_ops, name).default for name in _SCHEMAS)


def options(scores: Scores) -> tuple[float, int, float, Tensor | None, Tensor | None]:
    """The ops' last five arguments."""
    visible = scores.visible
    return scores.scale, visible.window or 0, scores.softcap or 0.0, visible.first_key, visible.key_mask


def _scores(scale: float, window: int, softcap: float, first_key: Tensor | None, key_mask: Tensor | None) -> Scores:
    return Scores(scale, softcap or None, Visibility(window or None, first_key, key_mask))


@torch.library.impl(f"{NAMESPACE}::attend", "CompositeExplicitAutograd")
def _attend(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return plain.forward(query, key, value, _scores(*options))


@torch.library.impl(f"{NAMESPACE}::attend_backward", "CompositeExplicitAutograd")
def _attend_backward(*arguments: Any) -> Tensor:
    gradient, query, key, value, output, lse, key_gradient, value_gradient, *options = arguments
    scores = _scores(*options)
    return plain.backward(gradient, query, key, value, output, lse, key_gradient, value_gradient, scores)


@torch.library.impl(f"{NAMESPACE}::append", "CompositeExplicitAutograd")
def _append(buffer: Tensor, chunk: Tensor, start: int) -> None:
    buffer.narrow(2, start, chunk.shape[2]).copy_(chunk)


@torch.library.impl(f"{NAMESPACE}::accumulate", "CompositeExplicitAutograd")
def _accumulate(total: Tensor, part: Tensor) -> None:
    total.add_(part)


def _heads_inside_tokens(like: Tensor, size: int) -> Tensor:
    rows, heads, tokens, _ = like.shape
    return like.new_empty(rows, tokens, heads, size).transpose(1, 2)


@torch.library.register_fake(f"{NAMESPACE}::attend")
def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(query.dtype, torch.float32)
    return _heads_inside_tokens(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=dtype)


@torch.library.register_fake(f"{NAMESPACE}::attend_backward")
def _attend_backward_fake(gradient: Tensor, query: Tensor, *arguments: Any) -> Tensor:
    return _heads_inside_tokens(query, query.shape[3])


@torch.library.register_fake(f"{NAMESPACE}::append")
def _append_fake(buffer: Tensor, chunk: Tensor, start: int) -> None:
    return None


@torch.library.register_fake(f"{NAMESPACE}::accumulate")
def _accumulate_fake(total: Tensor, part: Tensor) -> None:
    return None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, scale, window, softcap, first_key, key_mask = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, first_key, key_mask)
    ctx.scale, ctx.window, ctx.softcap = scale, window, softcap


def _autograd(ctx: Any, gradient: Tensor, lse_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, output, lse, first_key, key_mask = ctx.saved_tensors
    dtype = torch.promote_types(key.dtype, torch.float32)
    key_gradient = torch.zeros(key.shape, dtype=dtype, device=key.device)
    value_gradient = torch.zeros(value.shape, dtype=dtype, device=value.device)
    query_gradient = attend_backward(
        gradient.contiguous(),
        query,
        key,
        value,
        output,
        lse,
        key_gradient,
        value_gradient,
        ctx.scale,
        ctx.window,
        ctx.softcap,
        first_key,
        key_mask,
    )
    return query_gradient, key_gradient.to(key.dtype), value_gradient.to(value.dtype), *(None,) * 5


torch.library.register_autograd(f"{NAMESPACE}::attend", _autograd, setup_context=_setup_context)

native.load()
