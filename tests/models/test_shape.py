"""Sizes read from configs, against those of the models themselves."""

from __future__ import annotations

import pytest
from support.tiny_models import tiny_config, tiny_model

from lightning_seq1f1b.models.shape import model_shape
from lightning_seq1f1b.schedule.costs import ModelShape


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "gemma2", "opt", "falcon", "bloom"]
)
def test_the_parameters_of_a_layer_follow_from_the_shape(family: str) -> None:
    """The matrices of a layer as the shape has them are those of the model, but for norms and biases."""
    model = tiny_model(family)
    shape = model_shape(model.config)
    projections = 2 * shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    mlp = (3 if shape.gated_mlp else 2) * shape.hidden_size * shape.intermediate_size
    layers = max((m for m in model.modules() if type(m).__name__ == "ModuleList"), key=len)
    matrices = sum(parameter.numel() for parameter in layers[0].parameters() if parameter.ndim > 1)
    assert matrices == projections + mlp
    assert shape.num_layers == len(layers)
    assert shape.hidden_size * shape.vocab_size == model.get_output_embeddings().weight.numel()


def test_a_window_of_every_layer_counts() -> None:
    assert model_shape(tiny_config("mistral")).sliding_window == 11
    assert model_shape(tiny_config("gemma2")).sliding_window is None
    assert model_shape(tiny_config("llama")).sliding_window is None


def test_the_experts_that_a_token_is_sent_to_count() -> None:
    assert model_shape(tiny_config("mixtral")).intermediate_size == 2 * 48
    assert model_shape(tiny_config("qwen3_next")).intermediate_size == 2 * 24 + 24


def test_llama() -> None:
    assert model_shape(tiny_config("llama")) == ModelShape(
        num_layers=4,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        gated_mlp=True,
        vocab_size=97,
    )
