"""peft's adapters on a causal language model: which of them equal one device when the model is cut."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXACT = (
    "LORA",
    "BOFT",
    "HRA",
    "IA3",
    "LN_TUNING",
    "LOHA",
    "LOKR",
    "MISS",
    "OFT",
    "RANDLORA",
    "ROAD",
    "TRAINABLE_TOKENS",
    "VERA",
)
"""peft's types of adapters that change single modules, token by token, and are trained by a test as on one device."""

_REASONS = {
    "ADALORA": "it adds a penalty over the weights of all layers to the loss, and gives ranks to layers by comparing "
    "them all, but each stage holds its own",
    "XLORA": "it runs the whole model once more, to mix its adapters by the hidden states of the last layer",
}


def peft_model_around(root: nn.Module, model: PreTrainedModel) -> Any | None:
    """The peft model that wraps the language model among the modules of `root`; None if there is none."""
    if "peft" not in sys.modules:
        return None
    from peft import PeftMixedModel, PeftModel

    wrappers = (each for each in root.modules() if isinstance(each, (PeftModel, PeftMixedModel)))
    return next((each for each in wrappers if each.get_base_model() is model), None)


def adapter_configs(root: nn.Module, model: PreTrainedModel) -> Mapping[str, Any]:
    """The configs of the adapters on a model by their names, whether peft wraps it or the model has loaded them."""
    wrapper = peft_model_around(root, model)
    if wrapper is not None:
        return dict(wrapper.peft_config)
    return dict(getattr(model, "peft_config", {})) if getattr(model, "_hf_peft_config_loaded", False) else {}


def check_adapters(root: nn.Module, model: PreTrainedModel) -> None:
    """Refuse adapters that a pipeline would train otherwise than one device.

    Args:
        root: the module that holds the model, and the peft model around it.
        model: the causal language model.

    Raises:
        ValueError: for an adapter that is not known to be exact, with the reason.
    """
    for name, config in adapter_configs(root, model).items():
        kind = getattr(config.peft_type, "value", str(config.peft_type))
        reason = None
        if config.is_prompt_learning:
            reason = (
                "it puts learned tokens, or keys and values, before every row, which the first stage, or all of them, "
                "would have to hold"
            )
        elif getattr(config, "alora_invocation_tokens", None):
            reason = "where an activated LoRA begins is looked up in the whole row, but a stage sees one chunk of it"
        elif kind not in EXACT:
            reason = _REASONS.get(kind, "it is not known to train as on one device when the model is cut into stages")
        if reason is not None:
            raise ValueError(
                f"the adapter {name!r} is of peft's type {kind}: {reason}. Known to be exact are {', '.join(EXACT)}"
            )
