"""How tensors lie in memory."""

from __future__ import annotations

from torch import Tensor


def unit_stride(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, with the entries of its last dimension side by side, as kernels read them."""
    if tensor.stride(-1) == 1:
        return tensor
    # Whatever its strides are, an empty tensor counts as contiguous.
    return tensor.contiguous() if tensor.numel() > 0 else tensor.new_empty(tensor.shape)
