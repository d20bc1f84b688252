"""Finding the one model to cut in a LightningModule."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model
from support.tiny_models import tiny_model
from torch import nn

from lightning_seq1f1b.models.find import find_causal_lm


class Module(nn.Module):
    """Holds models as attributes."""

    def __init__(self, **models: nn.Module) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)


def test_the_topmost_model_is_found() -> None:
    model = tiny_model("llama")
    assert find_causal_lm(Module(loss=nn.Linear(1, 1), lm=model)) == ("lm", model)
    assert find_causal_lm(Module(inner=Module(lm=model))) == ("inner.lm", model)


def test_the_module_itself_may_be_the_model() -> None:
    model = tiny_model("llama")
    assert find_causal_lm(model) == ("", model)


def test_a_model_inside_a_peft_model_is_found() -> None:
    model = tiny_model("llama")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert find_causal_lm(Module(lm=wrapped)) == ("lm.base_model.model", model)


def test_one_model_under_two_names_is_one() -> None:
    model = tiny_model("llama")
    assert find_causal_lm(Module(one=model, two=model)) == ("one", model)


def test_no_model() -> None:
    with pytest.raises(ValueError, match=r"no Hugging Face causal language model found in Module: .*self.model ="):
        find_causal_lm(Module(lm=nn.Linear(1, 1)))


def test_several_models() -> None:
    models = Module(policy=tiny_model("llama"), reference=tiny_model("gpt2"))
    with pytest.raises(ValueError, match=r"policy \(LlamaForCausalLM\), reference \(GPT2LMHeadModel\)"):
        find_causal_lm(models)
