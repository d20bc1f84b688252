"""The ops, as torch knows them: `torch.ops.lightning_seq1f1b.*`, with schema, meta kernel and autograd.

Defined here for every device by plain steps of torch; the extension adds native kernels for the CPU and CUDA to the
same ops, so that nothing that calls them has to know whether it was built.

- attend(query, key, value, scale, window, softcap, first_key, key_mask) -> (output, lse): attention of a chunk's
  queries over the keys and values of its prefix and itself. query [rows, heads, queries, size]; key [rows, KV heads,
  keys, size] and value [rows, KV heads, keys, value size], where `heads` is a multiple of `KV heads` and `keys` at
  least `queries`. The last query stands at the last key. `window` 0 and `softcap` 0.0 stand for none; first_key [rows,
  queries] int32 and key_mask [rows, keys] bool are described in `ops.visibility`. output [rows, heads, queries, value
  size], in memory with heads inside tokens, as layers want it. lse [rows, heads, queries], float32 (float64 for
  float64): log-sum-exp of the scores; +infinity for a query that sees no key, whose output is zero. The output is
  differentiable in query, key and value, once; the log-sum-exp is not.
- attend_backward(gradient, query, key, value, output, lse, key_gradient, value_gradient, ...) -> query gradient, in
  memory like the output. Adds to key_gradient and value_gradient, in place; float32 (float64 for float64), shaped like
  key and value. `lse` and `output` may have been merged with further terms, such as sinks.
- append(buffer, chunk, start): buffer[:, :, start : start + tokens] = chunk, both [rows, heads, tokens, size].
- accumulate(total, part): total += part, where `total` is float32 or float64 and `part` of any floating dtype.

All tensors' last strides are 1; first_key and key_mask are contiguous. On CUDA the native kernels take bfloat16 and
float16, heads of up to 256 entries, and float32 totals. What does not fit together is a ValueError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_seq1f1b.ops import native, plain
from lightning_seq1f1b.ops.arguments import FLOATING, check_attention, check_like, check_shapes
from lightning_seq1f1b.ops.attended import Attended
from lightning_seq1f1b.ops.once import refuse_second_derivatives
from lightning_seq1f1b.ops.options import Options
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


def arguments(options: Options) -> tuple[float, int, float, Tensor | None, Tensor | None]:
    """The ops' last five arguments."""
    visible = options.visible
    first_key, key_mask = (None if t is None else t.contiguous() for t in (visible.first_key, visible.key_mask))
    return options.scale, visible.window or 0, options.softcap or 0.0, first_key, key_mask


def _options(scale: float, window: int, softcap: float, first_key: Tensor | None, key_mask: Tensor | None) -> Options:
    return Options(scale, softcap or None, Visibility(window or None, first_key, key_mask))


def _attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    check_attention(query, key, value, *rest)
    return plain.forward(query, key, value, _options(*rest))


def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    key_gradient: Tensor,
    value_gradient: Tensor,
    *rest: Any,
) -> Tensor:
    check_attention(query, key, value, *rest)
    exact = torch.promote_types(query.dtype, torch.float32)
    shape = (*query.shape[:3], value.shape[3])
    check_like("gradient", gradient, shape, query.dtype, query)
    check_like("output", output, shape, query.dtype, query)
    check_like("lse", lse, query.shape[:3], exact, query)
    check_like("key_gradient", key_gradient, key.shape, exact, query)
    check_like("value_gradient", value_gradient, value.shape, exact, query)
    attended = Attended(query, key, value, output, lse)
    return plain.backward(gradient, attended, key_gradient, value_gradient, _options(*rest))


def _append(buffer: Tensor, chunk: Tensor, start: int) -> None:
    if buffer.ndim != 4 or chunk.ndim != 4:
        raise ValueError(f"buffer and chunk must have four axes, but have {buffer.ndim} and {chunk.ndim}")
    rows, heads, capacity, size = buffer.shape
    tokens = chunk.shape[2]
    check_like("chunk", chunk, (rows, heads, tokens, size), buffer.dtype, buffer)
    if not 0 <= start <= capacity - tokens:
        raise ValueError(f"a chunk of {tokens} tokens put at {start} does not fit into a buffer of {capacity} tokens")
    buffer.narrow(2, start, tokens).copy_(chunk)


def _accumulate(total: Tensor, part: Tensor) -> None:
    if total.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"total must be float32 or float64, but is {total.dtype}")
    if part.dtype not in FLOATING:
        raise ValueError(f"part must be of a floating dtype, but is {part.dtype}")
    check_like("part", part, total.shape, part.dtype, total)
    total.add_(part)


_implementations: tuple[Callable[..., object], ...] = (_attend, _attend_backward, _append, _accumulate)
for _name, _implementation in zip(_SCHEMAS, _implementations, strict=True):
    torch.library.impl(f"{NAMESPACE}::{_name}", "CompositeExplicitAutograd", _implementation)


def _heads_inside_tokens(like: Tensor, size: int) -> Tensor:
    rows, heads, tokens, _ = like.shape
    return like.new_empty(rows, tokens, heads, size).transpose(1, 2)


@torch.library.register_fake(f"{NAMESPACE}::attend")
def _attend_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    check_shapes(query, key, value)
    dtype = torch.promote_types(query.dtype, torch.float32)
    return _heads_inside_tokens(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=dtype)


@torch.library.register_fake(f"{NAMESPACE}::attend_backward")
def _attend_backward_fake(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    check_shapes(query, key, value)
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
    refuse_second_derivatives(f"{NAMESPACE}::attend")
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
