"""Tiny causal language models of any transformers family, with random weights large enough for gradients to matter."""

from __future__ import annotations

from typing import Any

import torch
from support.tiny_families import NUM_LAYERS, VOCAB_SIZE, tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel

__all__ = ["NUM_LAYERS", "VOCAB_SIZE", "tiny_batch", "tiny_config", "tiny_model"]


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
