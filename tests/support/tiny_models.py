"""Tiny causal language models of any transformers family, with random weights large enough for gradients to matter."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 97
NUM_LAYERS = 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
}
"""Sizes by the common names of transformers; a family takes those it knows."""

_NO_DROPOUT = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "residual_dropout",
    "hidden_dropout",
    "dropout",
    "activation_dropout",
    "layerdrop",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
)

_WINDOW = 11

_FAMILY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": _WINDOW},
    "mixtral": {"sliding_window": None},
    "gemma2": {"sliding_window": _WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": _WINDOW, "query_pre_attn_scalar": 8},
    "gpt_oss": {"sliding_window": _WINDOW, "num_experts_per_tok": 2},
}
"""What a family needs beside the sizes."""


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """Config of a 4-layer model of the family (a transformers model type), 32 wide, with 97 tokens and no dropout.

    Grouped-query attention (4 heads, 2 key-value heads) where the family knows it; every kind of layer in
    `layer_types` appears.
    """
    cls = CONFIG_MAPPING[family]
    default = cls()
    known = {**_SIZES, **dict.fromkeys(_NO_DROPOUT, 0.0)}
    values = {
        name: value
        for name, value in known.items()
        if getattr(default, name, None) is not None and not isinstance(getattr(cls, name, None), property)
    }
    kinds = list(dict.fromkeys(default.to_dict().get("layer_types") or ()))
    if kinds:
        count = overrides.get("num_hidden_layers", NUM_LAYERS)
        values["layer_types"] = (kinds * count)[:count]
    values.update(_FAMILY.get(family, {}))
    values.update(overrides)
    config = cls(**values)
    config.use_cache = False
    config._experts_implementation = "eager"  # the grouped kernels have no float64
    return config


def tiny_model(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, *, attention: str = "eager", **overrides: Any
) -> PreTrainedModel:
    """Model of `tiny_config(family, **overrides)` in training mode, the same for the same seed.

    Noise on top of transformers' initialisation keeps every parameter's gradient well above rounding. Floating
    buffers have `dtype` as well, so that float64 models compute in float64 throughout.
    """
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * (0.05 if parameter.ndim > 1 else 0.02))
    model = model.to(dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    return model.train()


def tiny_batch(
    rows: int = 2, length: int = 48, seed: int = 1, *, ignored: float = 0.3, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """A batch of random tokens: `input_ids` and `labels`, both [rows, length], a part `ignored` of the labels -100."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB_SIZE, (rows, length), generator=generator)
    labels = input_ids.masked_fill(torch.rand(rows, length, generator=generator) < ignored, -100)
    return {"input_ids": input_ids.to(device), "labels": labels.to(device)}
