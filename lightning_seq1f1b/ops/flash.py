"""Flash kernels for CUDA: those of flash-attn 3 or 2 where installed, and those inside torch.

All of them align the last query with the last key, read views of the KV buffer, share key-value heads natively, and
take the log-sum-exp back in the backward. They return the gradients of keys and values in the inputs' dtype, which
`accumulate` then adds to the float32 accumulators.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_seq1f1b.ops.library import accumulate
from lightning_seq1f1b.ops.scores import Scores

_aten = torch.ops.aten

DTYPES = frozenset({torch.bfloat16, torch.float16})
MAX_SIZE = 256


@cache
def flash_attn_2() -> Any:
    """The module with flash-attn 2's kernels; None where it is not installed."""
    return _module("flash_attn.flash_attn_interface")


@cache
def flash_attn_3() -> Any:
    """The module with flash-attn 3's kernels; None where it is not installed."""
    return _module("flash_attn_interface")


def torch_forward(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """By the kernels inside torch; no soft-cap."""
    output, lse, *_ = _aten._flash_attention_forward(
        *_heads_inside(query, key, value),
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        True,
        False,
        scale=scores.scale,
        **_torch_window(scores),
    )
    return output.transpose(1, 2), lse


def torch_backward(
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
    """By the kernels inside torch."""
    no_dropout = torch.empty(2, dtype=torch.uint64, device=query.device)
    gradients = _aten._flash_attention_backward(
        *_heads_inside(gradient, query, key, value, output),
        lse,
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        True,
        no_dropout,
        no_dropout,
        scale=scores.scale,
        **_torch_window(scores),
    )
    return _add(gradients, key_gradient, value_gradient)


def flash_attn_2_forward(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """By flash-attn 2."""
    output, lse, *_ = flash_attn_2()._flash_attn_forward(
        *_heads_inside(query, key, value),
        dropout_p=0.0,
        softmax_scale=scores.scale,
        causal=True,
        **_window(scores),
        softcap=scores.softcap or 0.0,
        alibi_slopes=None,
        return_softmax=False,
    )
    return output.transpose(1, 2), lse


def flash_attn_2_backward(
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
    """By flash-attn 2."""
    inputs = _heads_inside(gradient, query, key, value, output)
    gradients = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs[1:4]]
    flash_attn_2()._flash_attn_backward(
        *inputs,
        lse,
        *gradients,
        dropout_p=0.0,
        softmax_scale=scores.scale,
        causal=True,
        **_window(scores),
        softcap=scores.softcap or 0.0,
        alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return _add(gradients, key_gradient, value_gradient)


def flash_attn_3_forward(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """By flash-attn 3."""
    output, lse, *_ = flash_attn_3()._flash_attn_forward(
        *_heads_inside(query, key, value),
        softmax_scale=scores.scale,
        causal=True,
        **_window(scores),
        softcap=scores.softcap or 0.0,
    )
    return output.transpose(1, 2), lse


def flash_attn_3_backward(
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
    """By flash-attn 3."""
    inputs = _heads_inside(gradient, query, key, value, output)
    gradients = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs[1:4]]
    flash_attn_3()._flash_attn_backward(
        *inputs,
        lse,
        dq=gradients[0],
        dk=gradients[1],
        dv=gradients[2],
        softmax_scale=scores.scale,
        is_causal=True,
        **_window(scores),
        softcap=scores.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return _add(gradients, key_gradient, value_gradient)


def _module(name: str) -> Any:
    # ImportError also where it was built for another torch, whose symbols it then misses.
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _heads_inside(*tensors: Tensor) -> list[Tensor]:
    """[rows, heads, tokens, size] -> [rows, tokens, heads, size], without a copy."""
    return [tensor.transpose(1, 2) for tensor in tensors]


def _window(scores: Scores) -> dict[str, int]:
    window = scores.visible.window
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def _torch_window(scores: Scores) -> dict[str, int]:
    return {} if scores.visible.window is None else _window(scores)


def _add(gradients: Any, key_gradient: Tensor, value_gradient: Tensor) -> Tensor:
    query_part, key_part, value_part = (tensor.transpose(1, 2) for tensor in gradients)
    accumulate(key_gradient, key_part)
    accumulate(value_gradient, value_part)
    return query_part
