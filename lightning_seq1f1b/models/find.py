"""Find the model to cut among the modules of a LightningModule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_causal_lm(module: nn.Module) -> tuple[str, PreTrainedModel]:
    """The dotted name of the one model of transformers in a module, and the model; also one inside a peft model.

    Raises:
        ValueError: there is none, or more than one that is not part of another.
    """
    from transformers import PreTrainedModel

    found: list[tuple[str, PreTrainedModel]] = []
    for name, candidate in module.named_modules():
        inside = any(name.startswith(f"{outer}.") or outer == "" for outer, _ in found)
        if isinstance(candidate, PreTrainedModel) and not inside:
            found.append((name, candidate))
    if not found:
        raise ValueError(
            f"no Hugging Face causal language model found in {type(module).__name__}: make one in configure_model or "
            "__init__ and keep it as an attribute, for example self.model = AutoModelForCausalLM.from_pretrained(...)"
        )
    if len(found) > 1:
        models = ", ".join(f"{name} ({type(model).__name__})" for name, model in found)
        raise ValueError(
            f"{type(module).__name__} holds {len(found)} models of transformers: {models}. One model is cut into "
            "stages; keep a second one, such as a frozen reference, out of the module's attributes"
        )
    return found[0]
