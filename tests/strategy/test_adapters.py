"""Every kind of adapter that is let through trains as on one device; every other is refused with its reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import peft
import pytest
import torch
from peft import get_peft_model
from support.float64 import float64_throughout
from support.staged_run import largest_difference, make_stages, run_stages, run_whole
from support.tiny_models import VOCAB_SIZE, tiny_model
from torch import nn
from transformers import PreTrainedModel

from lightning_seq1f1b.models.without_memory import free
from lightning_seq1f1b.strategy.adapters import EXACT, adapter_configs, check_adapters, peft_model_around

TOLERANCE = 1e-10

LINEAR = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
KINDS: dict[str, Any] = {
    "LORA": peft.LoraConfig(r=2, use_dora=True, init_lora_weights=False, **LINEAR),
    "BOFT": peft.BOFTConfig(boft_block_size=8, init_weights=False, **LINEAR),
    "HRA": peft.HRAConfig(r=2, init_weights=False, **LINEAR),
    "IA3": peft.IA3Config(feedforward_modules=["down_proj"], init_ia3_weights=False, **LINEAR),
    "LN_TUNING": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "LOHA": peft.LoHaConfig(r=2, init_weights=False, **LINEAR),
    "LOKR": peft.LoKrConfig(r=2, init_weights=False, **LINEAR),
    "MISS": peft.MissConfig(r=2, init_weights=False, **LINEAR),
    "OFT": peft.OFTConfig(r=0, oft_block_size=8, init_weights=False, **LINEAR),
    "RANDLORA": peft.RandLoraConfig(r=2, init_weights=False, **LINEAR),
    "ROAD": peft.RoadConfig(variant="road_2", group_size=8, init_weights=False, **LINEAR),
    "TRAINABLE_TOKENS": peft.TrainableTokensConfig(token_indices=[3, 5, 8], target_modules=["embed_tokens"]),
    "VERA": peft.VeraConfig(r=4, init_weights=False, target_modules=["q_proj", "v_proj"]),
}

PARTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "all-linear": (peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False), {}),
    "embeddings": (peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False), {}),
    "tied embeddings": (
        peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False),
        {"tie_word_embeddings": True},
    ),
    "tied head": (
        peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False),
        {"tie_word_embeddings": True},
    ),
    "trained head": (peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]), {}),
    "trained tied tokens": (
        peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[3, 5]),
        {"tie_word_embeddings": True},
    ),
}


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """BOFT looks for a compiler, and where it finds none leaves CXX set to one for C."""
    with mock.patch.dict(os.environ):
        yield


def adapted(config: Any, **overrides: Any) -> PreTrainedModel:
    """The language model inside a peft model."""
    return get_peft_model(tiny_model("llama", torch.float64, **overrides), config).to(torch.float64).base_model.model


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB_SIZE, (2, 48), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize(
    ("config", "overrides"),
    [*((config, {}) for config in KINDS.values()), *PARTS.values()],
    ids=[*KINDS, *PARTS],
)
def test_trains_as_on_one_device(config: Any, overrides: dict[str, Any]) -> None:
    tiny_model("llama")  # loads what is lifted to double precision
    with float64_throughout():
        torch.manual_seed(0)
        model = adapted(config, **overrides)
        truth = run_whole(model, batch())
        assert any(gradient is not None for gradient in truth.gradients.values())
        assert largest_difference(run_stages(make_stages(model), batch()), truth) < TOLERANCE


def test_every_kind_that_is_let_through_is_tried() -> None:
    assert set(KINDS) == set(EXACT)
    for kind, config in KINDS.items():
        assert config.peft_type == kind


REFUSED = {
    "learned tokens": peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "learned tokens, or keys": peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "penalty over the weights of all layers": peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"]),
    "looked up in the whole row": peft.LoraConfig(
        target_modules=["q_proj"], alora_invocation_tokens=[3, 4], task_type="CAUSAL_LM"
    ),
    "not known to train as on one device": peft.VBLoRAConfig(
        target_modules=["q_proj"], num_vectors=4, vector_length=8, topk=2
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_others_are_refused_with_the_reason(reason: str) -> None:
    root = nn.ModuleDict({"model": get_peft_model(tiny_model("llama"), REFUSED[reason])})
    with pytest.raises(ValueError, match=f"adapter 'default' is of peft's type .*{reason}.*Known to be exact are LORA"):
        check_adapters(root, root["model"].get_base_model())


def test_adapters_are_found_wherever_they_are() -> None:
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    plain, native = tiny_model("llama"), tiny_model("llama")
    native.peft_config, native._hf_peft_config_loaded = {"mine": config}, True  # as transformers' add_adapter does
    wrapped = get_peft_model(tiny_model("llama"), config)
    inner = wrapped.get_base_model()
    assert peft_model_around(nn.ModuleDict({"a": plain, "b": wrapped}), inner) is wrapped
    assert peft_model_around(nn.ModuleDict({"a": plain, "b": wrapped}), plain) is None
    assert list(adapter_configs(wrapped, inner)) == ["default"]
    assert list(adapter_configs(nn.ModuleDict({"a": native}), native)) == ["mine"]
    assert adapter_configs(plain, plain) == {}


@pytest.mark.parametrize("own", ["first half", "second half"])
@pytest.mark.parametrize("config", [KINDS["LORA"], *(config for config, _ in PARTS.values())], ids=["DORA", *PARTS])
def test_adapters_of_a_model_without_foreign_values_equal_those_of_the_whole(own: str, config: Any) -> None:
    """As `from_pretrained` leaves it inside configure_model."""
    whole, part = (tiny_model("llama", tie_word_embeddings=False) for _ in range(2))
    names = ["model.layers.2", "model.layers.3", "model.norm", "lm_head"]
    if own == "second half":
        names = ["model.embed_tokens", "model.layers.0", "model.layers.1"]
    free(map(part.get_submodule, names), kept=[])
    states = []
    for each in (whole, part):
        torch.manual_seed(3)
        get_peft_model(each, config)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    expected, values = dict(whole.named_parameters()), dict(part.named_parameters())
    assert list(values) == list(expected)
    for name, parameter in values.items():
        assert parameter.requires_grad == expected[name].requires_grad
        assert parameter.is_meta == name.startswith(tuple(f"{foreign}." for foreign in names))
        if not parameter.is_meta:
            assert torch.equal(parameter, expected[name]), name
