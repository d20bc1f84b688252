"""Saving a model by itself, which would silently write one stage's part, is refused once it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import nn


def refuse_saving(modules: Iterable[nn.Module]) -> None:
    """Replace `save_pretrained` on models of transformers and peft by an error that says what to do.

    Args:
        modules: the modules of a LightningModule whose model has been cut; the others are left alone.
    """
    for module in modules:
        if hasattr(type(module), "save_pretrained"):
            refusal: Any = _refusal(type(module).__name__)
            module.save_pretrained = refusal


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"save_pretrained of a {name} that is cut into pipeline stages would write this stage's part only: call "
            "trainer.strategy.save_pretrained(directory) on all ranks, which writes the whole model"
        )

    return refuse
