"""Our attention function and mask function, registered with the attention interface of transformers.

The mask function describes a causal mask, with a window and padding, instead of filling a matrix, and the attention
function hands the description to `ops.attention`, which needs no matrix for it. Any other mask stays a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

from lightning_seq1f1b.models.autocasting import autocasted
from lightning_seq1f1b.ops.attention import chunk_attention
from lightning_seq1f1b.ops.visibility import Visibility
from lightning_seq1f1b.runtime.kv_buffer import appended

NAME = "lightning_seq1f1b"
"""Value of `attn_implementation` that selects our functions."""

_first_key: ContextVar[Tensor | None] = ContextVar("first_key", default=None)


@contextmanager
def documents(first_key: Tensor | None) -> Iterator[None]:
    """Inside, masks are described for rows packed with documents, in this thread.

    A mask function is given nothing but what transformers knows, and that is not where documents begin.

    Args:
        first_key: see `runtime.batching.Chunk`; of the chunk that the model runs inside. None when nothing is packed.
    """
    token = _first_key.set(first_key)
    try:
        yield
    finally:
        _first_key.reset(token)


def describe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Visibility | Tensor:
    """What transformers asks for once per forward and kind of layer, in place of a mask.

    Args:
        batch_size: rows.
        q_length: queries.
        kv_length: keys.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: predicate on (row, head, query, key).
        attention_mask: [rows, tokens so far], true for a real token; None without padding.
        use_vmap: whether the predicate is not made of element-wise operations.
        device: where a filled mask goes.
        kwargs: for other implementations.

    Returns:
        A description, or a boolean mask [rows, 1, queries, keys], true where a query sees a key.

    Raises:
        ValueError: for rows packed with documents, when the mask is no plain or windowed causal one.
    """
    first_key = _first_key.get()
    # Queries that do not end with the keys, as in a cache of fixed size, are not what a description means.
    if not use_vmap and q_offset + q_length == kv_offset + kv_length:
        key_mask = None
        if attention_mask is not None:
            key_mask = attention_mask[:, kv_offset : kv_offset + kv_length].bool().contiguous()
        if first_key is not None:
            first_key = (first_key - kv_offset).clamp(min=0)
        if mask_function is causal_mask_function:
            return Visibility(None, first_key, key_mask)
        window = _window(mask_function)
        if window is not None:
            return Visibility(window, first_key, key_mask)
    if first_key is not None:
        raise ValueError("rows packed with documents need masks that are causal, with or without a window")
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        use_vmap=use_vmap,
        device=device,
    )
    assert mask is not None, "skipping was not allowed"
    return mask


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visibility | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What attention layers call in place of their own attention.

    Args:
        module: the attention layer.
        query: [rows, heads, tokens, size].
        key: [rows, KV heads, keys, size], of the prefix and the chunk.
        value: [rows, KV heads, keys, value size].
        attention_mask: what `describe_mask` gave, or a mask of the model's own: true where a query sees a key, or
            added to the scores; None for causal layers without a mask.
        scaling: factor on the scores; None for 1 / sqrt(size).
        dropout: probability of dropping an attention weight.
        softcap: bound that scores are squashed to, by tanh.
        s_aux: [heads], attention sinks: scores of a key without a value.
        position_bias: added to the scores, broadcastable to [rows, heads, tokens, keys].
        is_causal: overrides the layer's own `is_causal`.
        kwargs: what other implementations take, and whatever the model's forward was given.

    Returns:
        [rows, tokens, heads, value size], and None for the attention weights.
    """
    mask, bias = None, position_bias
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    visible = None
    if isinstance(attention_mask, Visibility):
        causal, visible = True, attention_mask
    elif attention_mask is not None:
        causal = False
        if attention_mask.dtype == torch.bool:
            mask = attention_mask
        else:
            bias = attention_mask if bias is None else bias + attention_mask
    output = chunk_attention(
        autocasted(query),
        autocasted(key),
        autocasted(value),
        scale=scaling,
        causal=causal,
        visible=visible,
        mask=mask,
        bias=bias,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout if module.training else 0.0,
        accumulators=appended(key, value),
    )
    return output.transpose(1, 2).contiguous(), None


def _window(mask_function: Callable[..., Any]) -> int | None:
    """The window of a sliding causal mask, None for any other predicate; read off what transformers built it from."""
    model = sliding_window_causal_mask_function(1)
    if getattr(mask_function, "__code__", None) is not model.__code__:
        return None
    parts, wanted = _enclosed(mask_function, "mask_functions"), _enclosed(model, "mask_functions")
    if len(parts) != 2 or parts[1] is not causal_mask_function or parts[0].__code__ is not wanted[0].__code__:
        return None
    window = _enclosed(parts[0], "sliding_window")
    return window if isinstance(window, int) else None


def _enclosed(function: Callable[..., Any], name: str) -> Any:
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True)).get(name, ())


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, describe_mask)
