"""Sums the gradients of low-precision parameters in float32, so that many units lose no more than one backward does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

LOW = (torch.bfloat16, torch.float16)
"""Dtypes in which a sum of many small contributions loses most of them."""


class WideGradients:
    """Lets autograd make `.grad` of bfloat16 and float16 parameters float32, for as long as contributions come.

    Each unit's gradient, rounded once by the product that made it, is then added in float32, by autograd itself and
    parameter by parameter: no second set of low-precision gradients waits to be added.

    Args:
        parameters: whose gradients are summed; those of higher precision are left alone, as are those for which
            somebody has set `grad_dtype`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        low = dict.fromkeys(parameter for parameter in parameters if parameter.dtype in LOW)
        self._parameters = [parameter for parameter in low if parameter.grad_dtype == parameter.dtype]

    def begin(self) -> None:
        """From now on `.grad` is float32. There must be none yet."""
        for parameter in self._parameters:
            parameter.grad_dtype = torch.float32

    def end(self) -> None:
        """Clear `.grad`, whose sums the caller has taken, and let it have the parameter's dtype again."""
        for parameter in self._parameters:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
