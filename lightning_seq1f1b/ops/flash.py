"""Flash kernels for CUDA: those of flash-attn 3 or 2 where installed, and those inside torch.

All of them align the last query with the last key, read views of the KV buffer, share key-value heads natively, and
take the log-sum-exp back in the backward. They return the gradients of keys and values in the inputs' dtype, which
`accumulate` then adds to the float32 accumulators.

Every forward takes and returns what `ops.library` says of `attend`, every backward of `attend_backward`; bfloat16 and
float16, on CUDA. What each lacks is said in `ops.kernels`.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_seq1f1b.ops.attended import Attended
from lightning_seq1f1b.ops.library import accumulate
from lightning_seq1f1b.ops.options import Options

_aten = torch.ops.aten


@cache
def flash_attn_2() -> Any:
    """The module with flash-attn 2's kernels; None where there is none that takes the arguments used here."""
    return _module("flash_attn.flash_attn_interface", {"window_size_left", "softcap", "causal"})


@cache
def flash_attn_3() -> Any:
    """The module with flash-attn 3's kernels; None where there is none that takes the arguments used here."""
    return _module("flash_attn_interface", {"window_size_left", "softcap", "is_causal"})


def torch_forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
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
        scale=options.scale,
        **_torch_window(options),
    )
    return output.transpose(1, 2), lse


def torch_backward(
    gradient: Tensor, attended: Attended, key_gradient: Tensor, value_gradient: Tensor, options: Options
) -> Tensor:
    """By the kernels inside torch."""
    no_dropout = torch.empty(2, dtype=torch.uint64, device=gradient.device)
    gradients = _aten._flash_attention_backward(
        *_heads_inside(gradient, *attended[:4]),
        attended.lse,
        None,
        None,
        attended.query.shape[2],
        attended.key.shape[2],
        0.0,
        True,
        no_dropout,
        no_dropout,
        scale=options.scale,
        **_torch_window(options),
    )
    return _add(gradients, key_gradient, value_gradient)


def flash_attn_2_forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """By flash-attn 2."""
    output, lse, *_ = flash_attn_2()._flash_attn_forward(
        *_heads_inside(query, key, value),
        dropout_p=0.0,
        softmax_scale=options.scale,
        causal=True,
        **_window(options),
        softcap=options.softcap or 0.0,
        alibi_slopes=None,
        return_softmax=False,
    )
    return output.transpose(1, 2), lse


def flash_attn_2_backward(
    gradient: Tensor, attended: Attended, key_gradient: Tensor, value_gradient: Tensor, options: Options
) -> Tensor:
    """By flash-attn 2."""
    inputs = _heads_inside(gradient, *attended[:4])
    gradients = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs[1:4]]
    flash_attn_2()._flash_attn_backward(
        *inputs,
        attended.lse,
        *gradients,
        dropout_p=0.0,
        softmax_scale=options.scale,
        causal=True,
        **_window(options),
        softcap=options.softcap or 0.0,
        alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return _add(gradients, key_gradient, value_gradient)


def flash_attn_3_forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """By flash-attn 3."""
    output, lse, *_ = flash_attn_3()._flash_attn_forward(
        *_heads_inside(query, key, value),
        softmax_scale=options.scale,
        causal=True,
        **_window(options),
        softcap=options.softcap or 0.0,
    )
    return output.transpose(1, 2), lse


def flash_attn_3_backward(
    gradient: Tensor, attended: Attended, key_gradient: Tensor, value_gradient: Tensor, options: Options
) -> Tensor:
    """By flash-attn 3."""
    inputs = _heads_inside(gradient, *attended[:4])
    gradients = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs[1:4]]
    flash_attn_3()._flash_attn_backward(
        *inputs,
        attended.lse,
        dq=gradients[0],
        dk=gradients[1],
        dv=gradients[2],
        softmax_scale=options.scale,
        is_causal=True,
        **_window(options),
        softcap=options.softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return _add(gradients, key_gradient, value_gradient)


def _module(name: str, arguments: set[str]) -> Any:
    # ImportError also where it was built for another torch, whose symbols it then misses.
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    # The names of arguments have changed from one generation to the next.
    return module if arguments <= _parameters(getattr(module, "_flash_attn_backward", None)) else None


def _parameters(function: Any) -> set[str]:
    # What torch.library.custom_op makes of a function keeps it in `_init_fn`, and has no signature itself.
    function = getattr(function, "_init_fn", function)
    return set(inspect.signature(function).parameters) if callable(function) else set()


def _heads_inside(*tensors: Tensor) -> list[Tensor]:
    """[rows, heads, tokens, size] -> [rows, tokens, heads, size], without a copy.

    Of `.data`: some releases declare that they write to their inputs, which would make autograd refuse what other
    operations have saved of these.
    """
    return [tensor.data.transpose(1, 2) for tensor in tensors]


def _window(options: Options) -> dict[str, int]:
    window = options.visible.window
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


def _torch_window(options: Options) -> dict[str, int]:
    return {} if options.visible.window is None else _window(options)


def _add(gradients: Any, key_gradient: Tensor, value_gradient: Tensor) -> Tensor:
    query_part, key_part, value_part = (tensor.transpose(1, 2) for tensor in gradients)
    accumulate(key_gradient, key_part)
    accumulate(value_gradient, value_part)
    return query_part
