"""Activation recomputation layer by layer, in place of transformers' own, which gives up the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Recomputation:
    """Runs layers under a non-reentrant checkpoint wherever the user has switched on gradient checkpointing.

    transformers' own checkpointing hands layers no cache, so a chunk would not see the chunks before it. Its flags are
    therefore taken down wherever they are found, and the layers that carried one are recomputed by this object.

    Args:
        model: the model whose flags are watched.
        layers: the layers to recompute; their `forward` is wrapped.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        self._model = model
        self._layers = tuple(layers)
        self._active: set[int] = set()
        for layer in self._layers:
            layer.forward = self._wrap(layer)

    def take_over(self) -> None:
        """Look for flags that were set since the last time; to be called before a microbatch runs."""
        flagged = [module for module in self._model.modules() if getattr(module, "gradient_checkpointing", False)]
        if not flagged:
            return
        flags = {id(module) for module in flagged}
        chosen = [layer for layer in self._layers if any(id(module) in flags for module in layer.modules())]
        # Older families carry a flag on the owner of the layers only: then it means all of them.
        self._active.update(id(layer) for layer in chosen or self._layers)
        for module in flagged:
            module.gradient_checkpointing = False  # type: ignore[assignment]

    def _wrap(self, layer: nn.Module) -> Callable[..., Any]:
        forward = layer.forward

        @functools.wraps(forward)
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if id(layer) in self._active and layer.training and torch.is_grad_enabled():
                return checkpoint(forward, *args, use_reentrant=False, **kwargs)
            return forward(*args, **kwargs)

        return recomputed
