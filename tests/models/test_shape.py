"""Sizes read from configs, against those of the models themselves."""

from __future__ import annotations

import pytest
from support.tiny_models import tiny_config, tiny_model

from lightning_seq1f1b.models.shape import model_shape
from lightning_seq1f1b.schedule.costs import ModelShape, uniform_layer


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "gemma2", "opt", "falcon", "bloom"]
)
def test_the_parameters_of_a_layer_follow_from_the_shape(family: str) -> None:
    """The matrices of a layer as the shape has them are those of the model, but for norms and biases."""
    model = tiny_model(family)
    shape = model_shape(model.config)
    layers = max((m for m in model.modules() if type(m).__name__ == "ModuleList"), key=len)
    for index, layer in enumerate(layers):
        matrices = sum(parameter.numel() for parameter in layer.parameters() if parameter.ndim > 1)
        assert shape.layer(index).matrices == shape.layer(index).parameters == matrices
        assert uniform_layer(shape).matrices == matrices
    assert shape.num_layers == len(layers)
    assert shape.hidden_size * shape.vocab_size == model.get_output_embeddings().weight.numel()


def test_a_window_of_every_layer_counts() -> None:
    assert model_shape(tiny_config("mistral")).sliding_window == 11
    assert model_shape(tiny_config("gemma2")).sliding_window is None
    assert model_shape(tiny_config("llama")).sliding_window is None


def test_experts_are_read_under_every_name() -> None:
    mixtral, qwen = model_shape(tiny_config("mixtral")), model_shape(tiny_config("qwen3_next"))
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.expert_size) == (4, 2, 48)
    assert mixtral.intermediate_size == 0
    assert (qwen.num_experts, qwen.experts_per_token, qwen.expert_size) == (4, 2, 24)
    assert qwen.intermediate_size == 24
    deepseek = model_shape(tiny_config("deepseek_v3", n_routed_experts=4, n_shared_experts=2))
    assert (deepseek.num_experts, deepseek.experts_per_token, deepseek.expert_size) == (4, 2, 24)
    assert deepseek.intermediate_size == 48


def test_tied_embeddings_are_seen() -> None:
    assert model_shape(tiny_config("gemma2")).tied_embeddings
    assert not model_shape(tiny_config("llama")).tied_embeddings


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
