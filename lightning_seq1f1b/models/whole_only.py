"""Methods of a model that would silently work on one stage's part are refused once it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import nn

_ADVICE = {
    "save_pretrained": "would write this stage's part only: call trainer.save_checkpoint on all ranks, which writes "
    "the whole model, and save_pretrained after load_from_checkpoint on one device (or run lightning-seq1f1b export)",
    "generate": "needs the whole model: load a checkpoint on one device to generate",
}


def refuse_methods_of_the_whole(modules: Iterable[nn.Module]) -> None:
    """Replace `save_pretrained` and `generate` on models of transformers and peft by an error that says what to do.

    Args:
        modules: the modules of a LightningModule whose model has been cut; the others are left alone.
    """
    for module in modules:
        for method, advice in _ADVICE.items():
            if hasattr(type(module), "save_pretrained") and hasattr(type(module), method):
                setattr(module, method, _refusal(type(module).__name__, method, advice))


def _refusal(name: str, method: str, advice: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"{method} of a {name} that is cut into pipeline stages {advice}")

    return refuse
