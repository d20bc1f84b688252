"""A model of a few layers with the architecture of a large one, to measure what its parts take."""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NUM_LAYERS = 3
"""One layer behind the embedding, one alone, one before the head: what the parts add to a layer shows."""


def sample_config(config: PreTrainedConfig) -> tuple[PreTrainedConfig, int]:
    """A copy of a model's configuration with few layers, all like its most frequent one, and that one's index.

    Of several kinds of layers one with full attention is taken, as it shows what attention costs.
    """
    sample = copy.deepcopy(config)
    text: Any = sample.get_text_config(decoder=True)
    number = text.num_hidden_layers
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * number)
    kind = "full_attention" if "full_attention" in kinds else Counter(kinds).most_common(1)[0][0]
    # The last of its kind: models with experts often have a few plain layers first.
    index = max(place for place, each in enumerate(kinds) if each == kind)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == number:
            setattr(text, name, [value[index]] * NUM_LAYERS)
    if getattr(text, "first_k_dense_replace", None):
        text.first_k_dense_replace = 0 if index >= text.first_k_dense_replace else NUM_LAYERS
    text.num_hidden_layers = NUM_LAYERS
    return sample, index


def sample_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model of a configuration, with random weights, in training mode."""
    from transformers import AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(0)
        model: Any = auto_model.from_config(config, dtype=dtype)
    return model.to(device).train()
