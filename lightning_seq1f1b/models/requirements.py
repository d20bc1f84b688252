"""What a model must be and accept to be cut into stages, as far as its class and config tell."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str | None:
    """The model's name for its cache: `cache`, or `past_key_values` in older releases; None if it takes none."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


_BY_TYPE = {
    "doge": "its dynamic mask picks config.keep_window_size keys among those of the whole row, so that the result of "
    "a token depends on how many tokens follow it",
}
"""Model types that are not the same in chunks, which no general sign shows, with the reason."""


def _padded_positions(model: PreTrainedModel) -> int | None:
    """The padding index of a table of position embeddings, as RoBERTa has; None for all other models."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    tokens = model.get_input_embeddings()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module is tokens or "position" not in name:
            continue
        if module.padding_idx is not None and module.num_embeddings == limit:
            return module.padding_idx
    return None


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
    if config.model_type in _BY_TYPE:
        raise ValueError(f"{name} can't be run chunk by chunk: {_BY_TYPE[config.model_type]}")
    positions = _padded_positions(model)
    if positions is not None:
        raise ValueError(
            f"{name} counts positions from the id of its padding token on, and leaves padding out (its position "
            f"embedding has padding_idx={positions}); chunks are told positions that count from 0"
        )
    if getattr(config, "layerdrop", 0.0):
        raise ValueError(
            f"{name} has config.layerdrop={config.layerdrop}: layers that are left out at random, anew for every "
            "chunk, would leave gaps in the cache. Set it to 0."
        )
