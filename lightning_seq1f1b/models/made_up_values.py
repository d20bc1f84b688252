"""Let code that looks at values run on the meta device, where tensors have none: it is told something that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_OPS = torch.ops.aten


class MadeUpValues(TorchDispatchMode):
    """Inside, a number read from a meta tensor is 1, a list of them zeros, and one entry of a tensor is not zero.

    Routers of experts ask such things to send tokens about; what they compute is lost, but the layer around them runs
    through, and so shows what it is given, returns and keeps.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """What the operation gives, or something of a fitting shape."""
        kwargs = kwargs or {}
        tensor = args[0] if args and isinstance(args[0], Tensor) and args[0].is_meta else None
        if tensor is None:
            return func(*args, **kwargs)
        if func is _OPS._local_scalar_dense.default:
            return 1
        if func is _OPS.nonzero.default:
            return tensor.new_empty((1, tensor.ndim), dtype=torch.int64)
        if func is _OPS._to_copy.default and torch.device(kwargs.get("device") or "meta").type != "meta":
            return torch.zeros(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype)
        if func is _OPS.index.Tensor:
            return func(tensor, [index for given in args[1] for index in _places(given)], *args[2:], **kwargs)
        if func is _OPS.split_with_sizes.default:
            *sizes, _ = args[1]
            return func(tensor, [*sizes, tensor.shape[args[2] if len(args) > 2 else 0] - sum(sizes)], *args[2:])
        return func(*args, **kwargs)


def _places(index: Tensor | None) -> list[Tensor | None]:
    """An index, or one for every axis of a mask."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [index.new_empty(1, dtype=torch.int64) for _ in range(index.ndim)]
