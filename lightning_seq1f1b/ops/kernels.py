"""Which kernel computes an attention: the fastest one that has all it asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_seq1f1b.ops import flash, library, merged, native, plain
from lightning_seq1f1b.ops.arguments import FLOATING
from lightning_seq1f1b.ops.attended import Attended
from lightning_seq1f1b.ops.options import Options

HALVES = frozenset({torch.bfloat16, torch.float16})
LARGEST_CUDA_HEAD = 256


@dataclass(frozen=True, eq=False)
class Call:
    """What an attention asks for.

    Attributes:
        device: where query, key and value lie.
        dtype: theirs.
        size: entries of a query's and a key's head.
        value_size: entries of a value's head.
        keys: how many.
        options: the rest.
    """

    device: torch.device
    dtype: torch.dtype
    size: int
    value_size: int
    keys: int
    options: Options


@dataclass(frozen=True)
class Kernel:
    """A forward and its backward, with the meaning that `ops.library` gives to `attend` and `attend_backward`.

    Attributes:
        name: for people.
        forward: (query, key, value, options) -> (output, lse).
        backward: (gradient, attended, key_gradient, value_gradient, options) -> query gradient.
        lacks: what a call asks for that it has not; None when it can compute the call.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Attended, Tensor, Tensor, Options], Tensor]
    lacks: Callable[[Call], str | None]


def choose(call: Call) -> Kernel | None:
    """The fastest kernel for a call; None where only torch's attention with a mask or plain steps can compute it."""
    return next((kernel for kernel in fast_kernels(call.device.type) if kernel.lacks(call) is None), None)


def fast_kernels(device_type: str) -> tuple[Kernel, ...]:
    """The kernels for a kind of device, fastest first."""
    return {"cpu": (NATIVE, MERGED), "cuda": (FLASH_ATTN_3, FLASH_ATTN_2, TORCH_FLASH, NATIVE)}.get(device_type, ())


def explain(device: torch.device, dtype: torch.dtype) -> list[tuple[str, str | None]]:
    """The kernels for causal attention with heads of 64, fastest first, each with what it lacks; None for nothing."""
    call = Call(device, dtype, 64, 64, 1, Options(1.0))
    return [(kernel.name, kernel.lacks(call)) for kernel in fast_kernels(device.type)]


def _native_forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    output, lse = library.attend(query, key, value, *library.arguments(options))
    return output, lse


def _native_backward(
    gradient: Tensor, attended: Attended, key_gradient: Tensor, value_gradient: Tensor, options: Options
) -> Tensor:
    query_gradient: Tensor = library.attend_backward(
        gradient, *attended, key_gradient, value_gradient, *library.arguments(options)
    )
    return query_gradient


def _native_lacks(call: Call) -> str | None:
    if not native.available():
        return native.reason()
    if call.device.type == "cpu":
        return None if call.dtype in FLOATING else f"no {call.dtype}"
    build = native.build_info().cuda
    if build is None:
        return "the extension was built without CUDA"
    if not _runs(build.architectures, _capability(call.device)):
        return f"the extension was built for sm_{', sm_'.join(build.architectures)}"
    return _cuda_lacks(call)


def _runs(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Code for an architecture runs on later ones of its generation; that of the newest is in there as PTX too.

    With a letter behind its number it runs on just that architecture.
    """
    number = 10 * capability[0] + capability[1]
    if any(architecture.rstrip("af") == str(number) for architecture in architectures):
        return True
    portable = [int(architecture) for architecture in architectures if architecture.isdigit()]
    same = any(built // 10 == capability[0] and built <= number for built in portable)
    return same or (architectures[-1].isdigit() and number >= int(architectures[-1]))


def _merged_lacks(call: Call) -> str | None:
    if call.dtype not in FLOATING:
        return f"no {call.dtype}"
    if not call.options.visible.plain(call.keys):
        return "no window, documents or padding"
    if call.options.softcap is not None:
        return "no soft-cap"
    return None if call.size == call.value_size else "no values of another head size than keys"


def _cuda_lacks(call: Call) -> str | None:
    if _capability(call.device) < (8, 0):
        return "compute capability 8 at least"
    if call.dtype not in HALVES:
        return f"bfloat16 and float16 only, not {call.dtype}"
    fits = max(call.size, call.value_size) <= LARGEST_CUDA_HEAD
    return None if fits else f"heads of up to {LARGEST_CUDA_HEAD} entries only"


def _flash_lacks(call: Call) -> str | None:
    if call.options.visible.first_key is not None or call.options.visible.key_mask is not None:
        return "no documents or padding"
    if call.size != call.value_size or call.size % 8:
        return "heads of a multiple of 8 entries only, the same for keys and values"
    return _cuda_lacks(call)


def _flash_attn_2_lacks(call: Call) -> str | None:
    return "no flash-attn 2.7 or later" if flash.flash_attn_2() is None else _flash_lacks(call)


def _flash_attn_3_lacks(call: Call) -> str | None:
    if flash.flash_attn_3() is None:
        return "no flash-attn 3"
    # Its kernels are for Hopper; elsewhere it may not even have been built with what it would need.
    if _capability(call.device)[0] != 9:
        return "compute capability 9 only"
    return _flash_lacks(call)


def _torch_flash_lacks(call: Call) -> str | None:
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without it"
    return "no soft-cap" if call.options.softcap is not None else _flash_lacks(call)


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


NATIVE = Kernel("lightning_seq1f1b", _native_forward, _native_backward, _native_lacks)
MERGED = Kernel("torch, merged by log-sum-exp", merged.forward, merged.backward, _merged_lacks)
FLASH_ATTN_3 = Kernel("flash-attn 3", flash.flash_attn_3_forward, flash.flash_attn_3_backward, _flash_attn_3_lacks)
FLASH_ATTN_2 = Kernel("flash-attn 2", flash.flash_attn_2_forward, flash.flash_attn_2_backward, _flash_attn_2_lacks)
TORCH_FLASH = Kernel("torch flash", flash.torch_forward, flash.torch_backward, _torch_flash_lacks)
PLAIN = Kernel("plain torch", plain.forward, plain.backward, lambda call: None)
