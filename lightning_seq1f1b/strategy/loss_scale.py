"""One loss scale for all stages and replicas, as float16 needs it.

Under `16-mixed` gradients of activations are float16, those between stages too, so the loss is scaled where the
schedule begins its backwards and not when Lightning scales what `training_step` returns; the gradient bridge undoes
what was done twice. A step is skipped, and the scale lowered, by what any rank has found in its gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor
from torch.optim import Optimizer


def loss_scale(plugin: Precision, num_accumulated: int, device: torch.device) -> Tensor | None:
    """The factor of the gradients inside a step: what Lightning is about to multiply the loss by.

    Args:
        plugin: the Trainer's precision plugin.
        num_accumulated: by which Lightning divides the loss of each batch.
        device: where the scale is kept.

    Returns:
        0-d, float32; None where no loss is scaled.
    """
    scaler = _scaler(plugin)
    if scaler is None:
        return None
    scale: Tensor = scaler.scale(torch.ones((), dtype=torch.float32, device=device))
    return scale / num_accumulated


def share_loss_scale(plugin: Precision) -> None:
    """Let all processes skip the same steps, so that their scales stay equal.

    The scaler stays the user's, and its state in checkpoints what it is on one device. What it finds in gradients is
    shared where it looks for it: both before clipping and, for optimizers that unscale gradients themselves, as fused
    ones do, before their step.

    Args:
        plugin: the Trainer's precision plugin; nothing happens where it scales no loss.
    """
    scaler = _scaler(plugin)
    if scaler is None:
        return
    find = type(scaler)._unscale_grads_

    def unscale_and_share(
        optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = find(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        # Also where a stage has nothing to train and so has looked at nothing.
        anywhere = torch.stack([found_inf, *(each.to(found_inf.device) for each in found.values())]).amax(0)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        return {anywhere.device: anywhere}

    scaler._unscale_grads_ = unscale_and_share


def _scaler(plugin: Precision) -> Any:
    """The plugin's scaler, `torch.amp.GradScaler` or what derives from it; None where it scales no loss."""
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    return scaler if scaler is not None and scaler.is_enabled() else None
