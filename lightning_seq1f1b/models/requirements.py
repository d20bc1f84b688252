"""What a model must be and accept to be cut into stages, as far as its class and config tell."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str | None:
    """The model's name for its cache: `cache`, or `past_key_values` in older releases; None if it takes none."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def check_causal_lm(model: PreTrainedModel) -> None:
    """Refuse a model that is no decoder-only causal language model of transformers' making.

    Raises:
        ValueError: it is an encoder-decoder, has no head over the vocabulary, its forward lacks an argument, or its
            config asks for a loss that cannot be computed in pieces.
    """
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder-decoder model; only decoder-only causal language models can be cut into stages"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} has no output embeddings, so it is no causal language model; "
            "load the checkpoint with AutoModelForCausalLM"
        )
    parameters = inspect.signature(type(model).forward).parameters
    missing = [argument for argument in ("input_ids", "inputs_embeds", "labels") if argument not in parameters]
    if cache_argument(model) is None:
        missing.append("cache")
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        missing.append("**kwargs")
    if missing:
        raise ValueError(
            f"the forward of {name} does not take {', '.join(missing)}; to be run chunk by chunk, a causal language "
            "model needs the arguments input_ids, inputs_embeds, labels, cache (or past_key_values) and **kwargs, like "
            "those of transformers"
        )
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "layerdrop", 0.0):
        raise ValueError(
            f"{name} has config.layerdrop={config.layerdrop}: layers that are left out at random, anew for every "
            "chunk, would leave gaps in the cache. Set it to 0."
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"{name} has config.output_router_logits=True, which adds the routers' auxiliary loss: one product over "
            "all layers and tokens, which cannot be summed over stages and chunks. Set it to False."
        )
