"""Gradient clipping by the norm over all stages instead of this rank's alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn
from torch.optim import Optimizer


def clip_over_stages(
    plugin: Precision,
    counted: Callable[[], Collection[nn.Parameter]],
    norm_of: Callable[[Sequence[Tensor]], Tensor],
) -> None:
    """Make a precision plugin clip by the pipeline's norm.

    The method is bound on the instance: the plugin's class names the scaler's entry in checkpoints, so it must stay.

    Args:
        plugin: the Trainer's precision plugin.
        counted: gives the parameters that this rank counts in the norm; exactly one rank does for each.
        norm_of: the norm over all stages of the gradients that each rank counts.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = [parameter for parameter in plugin.main_params(optimizer) if parameter.grad is not None]
        share = counted()
        norm = norm_of([p.grad for p in parameters if p.grad is not None and p in share])
        torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), norm)

    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]
