"""What the tensors between two stages look like, told once by the sender instead of guessed by the receiver.

Rows and tokens are known to both sides from the plan and never cross the wire. The hidden size and the dtype are the
model's: under autocast the residual stream may be float32 or bfloat16, depending on the family. So the first activation
over a boundary is preceded by one small message.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class WireFormat:
    """Hidden size and dtype of the tensors that cross one stage boundary."""

    hidden_size: int
    dtype: torch.dtype

    @classmethod
    def of(cls, hidden: Tensor) -> WireFormat:
        """The format of a stage's output, [rows, tokens, hidden size]."""
        if hidden.ndim != 3 or hidden.dtype not in _DTYPES:
            raise ValueError(
                "a stage must hand [rows, tokens, hidden size] of a floating dtype to the next one, not "
                f"{tuple(hidden.shape)} of {hidden.dtype}"
            )
        return cls(hidden.shape[-1], hidden.dtype)

    def encode(self, device: torch.device) -> Tensor:
        """As a message: int64 [2]."""
        return torch.tensor([self.hidden_size, _DTYPES.index(self.dtype)], dtype=torch.int64, device=device)

    @classmethod
    def decode(cls, message: Tensor) -> WireFormat:
        """The inverse of `encode`."""
        hidden_size, index = message.tolist()
        return cls(hidden_size, _DTYPES[index])


Formats = dict[int, WireFormat]
"""By the stage that gives the tensor; the gradients that come back have the same format."""


def mode(device: torch.device) -> tuple[bool, torch.dtype | None]:
    """What a boundary's format depends on besides the model: autocast and its dtype. Equal on both sides."""
    if not torch.is_autocast_enabled(device.type):
        return False, None
    return True, torch.get_autocast_dtype(device.type)
