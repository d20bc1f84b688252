"""Which kernel computes an attention: the fastest one that has all it asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_seq1f1b.ops import flash, library, merged, native, plain
from lightning_seq1f1b.ops.scores import Scores

FLOATING = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


@dataclass(frozen=True, eq=False)
class Call:
    """What an attention asks for.

    Attributes:
        device_type: "cpu", "cuda", ...
        dtype: of query, key and value.
        size: entries of a query's and a key's head.
        value_size: entries of a value's head.
        keys: how many.
        scores: options.
    """

    device_type: str
    dtype: torch.dtype
    size: int
    value_size: int
    keys: int
    scores: Scores


@dataclass(frozen=True)
class Kernel:
    """A forward and its backward, with the meaning that `ops.library` gives to `attend` and `attend_backward`.

    Attributes:
        name: for people.
        forward: (query, key, value, scores) -> (output, lse).
        backward: (gradient, query, key, value, output, lse, key_gradient, value_gradient, scores) -> query gradient.
        lacks: what a call asks for that it has not; None when it can compute the call.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Scores], tuple[Tensor, Tensor]]
    backward: Callable[..., Tensor]
    lacks: Callable[[Call], str | None]


def choose(call: Call) -> Kernel | None:
    """The fastest kernel for a call; None where only plain steps of torch can compute it."""
    return next((kernel for kernel in fast_kernels(call.device_type) if kernel.lacks(call) is None), None)


def fast_kernels(device_type: str) -> tuple[Kernel, ...]:
    """The kernels for a kind of device, fastest first."""
    return {"cpu": (NATIVE, MERGED), "cuda": (FLASH_ATTN_3, FLASH_ATTN_2, TORCH_FLASH, NATIVE)}.get(device_type, ())


def explain(device_type: str, dtype: torch.dtype) -> list[tuple[str, str | None]]:
    """The kernels for causal attention with heads of 64, fastest first, each with what it lacks; None for nothing."""
    call = Call(device_type, dtype, 64, 64, 1, Scores(1.0))
    return [(kernel.name, kernel.lacks(call)) for kernel in fast_kernels(device_type)]


def _native_forward(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    output, lse = library.attend(query, key, value, *library.options(scores))
    return output, lse


def _native_backward(*arguments: Tensor | Scores) -> Tensor:
    *tensors, scores = arguments
    assert isinstance(scores, Scores)
    gradient: Tensor = library.attend_backward(*tensors, *library.options(scores))
    return gradient


def _native_lacks(call: Call) -> str | None:
    if not native.available():
        return native.reason()
    if call.device_type == "cpu":
        return None if call.dtype in FLOATING else f"no {call.dtype}"
    if native.build_info().cuda is None:
        return "the extension was built without CUDA"
    return _cuda_lacks(call)


def _merged_lacks(call: Call) -> str | None:
    if call.dtype not in FLOATING:
        return f"no {call.dtype}"
    if not call.scores.visible.plain(call.keys):
        return "no window, documents or padding"
    if call.scores.softcap is not None:
        return "no soft-cap"
    return None if call.size == call.value_size else "no values of another head size than keys"


def _cuda_lacks(call: Call) -> str | None:
    if call.dtype not in flash.DTYPES:
        return f"bfloat16 and float16 only, not {call.dtype}"
    return None if max(call.size, call.value_size) <= flash.MAX_SIZE else f"heads of up to {flash.MAX_SIZE} only"


def _flash_lacks(call: Call) -> str | None:
    if call.scores.visible.first_key is not None or call.scores.visible.key_mask is not None:
        return "no documents or padding"
    if call.size != call.value_size or call.size % 8:
        return "heads of a multiple of 8 entries only, the same for keys and values"
    return _cuda_lacks(call)


def _flash_attn_2_lacks(call: Call) -> str | None:
    return "flash-attn 2 is not installed" if flash.flash_attn_2() is None else _flash_lacks(call)


def _flash_attn_3_lacks(call: Call) -> str | None:
    if flash.flash_attn_3() is None:
        return "flash-attn 3 is not installed"
    # Its kernels are for Hopper; elsewhere it may not even have been built with what it would need.
    if torch.cuda.get_device_capability()[0] != 9:
        return "flash-attn 3 runs on compute capability 9 only"
    return _flash_lacks(call)


def _torch_flash_lacks(call: Call) -> str | None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8:
        return "compute capability 8 at least"
    return "no soft-cap" if call.scores.softcap is not None else _flash_lacks(call)


NATIVE = Kernel("lightning_seq1f1b", _native_forward, _native_backward, _native_lacks)
MERGED = Kernel("torch, merged by log-sum-exp", merged.forward, merged.backward, _merged_lacks)
FLASH_ATTN_3 = Kernel("flash-attn 3", flash.flash_attn_3_forward, flash.flash_attn_3_backward, _flash_attn_3_lacks)
FLASH_ATTN_2 = Kernel("flash-attn 2", flash.flash_attn_2_forward, flash.flash_attn_2_backward, _flash_attn_2_lacks)
TORCH_FLASH = Kernel("torch flash", flash.torch_forward, flash.torch_backward, _torch_flash_lacks)
PLAIN = Kernel("plain torch", plain.forward, plain.backward, lambda call: None)
