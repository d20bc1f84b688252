"""What `generate` of a cut model cannot do is refused with its reason; everything else goes to transformers."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny_model
from transformers import DynamicCache, GenerationConfig

from lightning_seq1f1b.models.generation_checks import check_arguments, setting

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", torch.float32)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"assistant_model": object()}, "assistant_model: tokens that are guessed ahead"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens: tokens that are guessed ahead"),
        ({"max_time": 2.0}, "max_time: every rank would stop by its own clock"),
        ({"generation_config": GenerationConfig(max_time=2.0)}, "max_time: every rank"),
        ({"cache_implementation": "static"}, "cache_implementation='static': the cache of every stage grows"),
        ({"guidance_scale": 1.5}, "guidance_scale: it runs the model once more"),
        ({"custom_generate": lambda model: None}, "custom_generate: only transformers' own loop"),
        ({"past_key_values": DynamicCache()}, "past_key_values: it makes its cache itself"),
        ({"inputs_embeds": torch.zeros(1, 2, 32)}, "inputs_embeds: the first stage embeds"),
        ({"output_hidden_states": True}, "output_hidden_states: they exist on one stage only"),
    ],
)
def test_is_refused_with_the_reason(model, arguments, reason):
    with pytest.raises(ValueError, match="LlamaForCausalLM that is cut into pipeline stages") as error:
        check_arguments(model, arguments, CPU)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"guidance_scale": 1, "output_attentions": False, "cache_implementation": "dynamic"},
        {"generation_config": GenerationConfig(num_beams=3), "stop_strings": "x", "max_new_tokens": 4},
    ],
)
def test_is_left_to_transformers(model, arguments):
    check_arguments(model, arguments, CPU)


def test_a_model_elsewhere_than_its_stages(model):
    with pytest.raises(RuntimeError, match=r"is on cpu.*Call self.model.to\('cuda:1'\) first"):
        check_arguments(model, {}, torch.device("cuda", 1))


def test_a_setting_is_the_nearest(model):
    config = GenerationConfig(num_beams=3)
    model.generation_config.num_beams = 2
    assert setting(model, {"num_beams": 4, "generation_config": config}, "num_beams") == 4
    assert setting(model, {"generation_config": config}, "num_beams") == 3
    assert setting(model, {}, "num_beams") == 2
    assert setting(model, {}, "max_time") is None
