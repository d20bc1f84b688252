"""What autocast would do to the inputs of attention, for code that autocast does not reach."""

from __future__ import annotations

import torch
from torch import Tensor


def autocasted(tensor: Tensor) -> Tensor:
    """The tensor in autocast's dtype where autocast is on, else as it is; float64 is left alone, as autocast does."""
    device = tensor.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
