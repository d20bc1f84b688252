"""What is found out about a model before it is cut, and which models are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.staged_run import LAYER_RANGES
from support.tiny_models import tiny_config, tiny_model
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_seq1f1b.models.attention import NAME
from lightning_seq1f1b.models.probe import probe
from lightning_seq1f1b.models.split import cut
from lightning_seq1f1b.models.without_memory import free


def test_what_runs_before_the_layers_is_found_whatever_the_order_of_registration() -> None:
    model = tiny_model("opt")
    names = [name for name, _ in model.model.decoder.named_children()]
    assert names.index("final_layer_norm") < names.index("layers")
    before = probe(model).before
    assert before == {"model.decoder.embed_tokens", "model.decoder.embed_positions"}


@pytest.mark.parametrize(("family", "outputs"), [("llama", None), ("bloom", 2), ("falcon_h1", 1), ("mixtral", None)])
def test_what_layers_return(family: str, outputs: int | None) -> None:
    assert probe(tiny_model(family)).layer_outputs == outputs


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss", "qwen3_next"])
def test_our_attention_is_chosen_where_layers_use_the_interface(family: str) -> None:
    assert probe(tiny_model(family)).attention == NAME


@pytest.mark.parametrize("family", ["bloom", "falcon", "mpt"])
def test_the_own_attention_is_left_where_layers_compute_it_themselves(family: str) -> None:
    assert probe(tiny_model(family, attention="eager")).attention == "eager"


def test_the_own_attention_is_left_where_layers_tell_it_what_ours_ignores() -> None:
    """Sinks by the name of another release, or whatever else has a gradient."""
    assert probe(tiny_model("inkling2_text")).attention == "eager"


def test_modules_of_other_stages_may_be_without_memory() -> None:
    """As when a rank has loaded its own part of a checkpoint only."""
    model, part = tiny_model("mixtral"), tiny_model("mixtral")
    free([*part.model.layers[:2], part.model.embed_tokens], kept=[])
    assert probe(part) == probe(model)
    split = cut(part, [1], [range(2), range(2, 4)])
    assert not any(parameter.is_meta for parameter in part.parameters())
    with split.whole():
        assert [name for name, _ in part.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_the_model_is_not_touched() -> None:
    model = tiny_model("llama")
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    model.model.layers[1].register_forward_hook(lambda *_: pytest.fail("the hook ran"))
    model.requires_grad_(False)
    probe(model)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert not parameter.requires_grad
    assert model.training
    assert model.config._attn_implementation == "eager"


class NeedsMore(LlamaForCausalLM):
    """Cannot be made from its config alone."""

    def __init__(self, config: Any, temperature: float) -> None:
        super().__init__(config)
        self.temperature = temperature


def test_a_class_of_ones_own_need_not_be_made_from_its_config() -> None:
    assert probe(NeedsMore(tiny_config("llama"), temperature=2.0)).attention == NAME


def refuse(model: PreTrainedModel, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut(model, [0], [range(4)])


def test_an_encoder_decoder() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, vocab_size=32)
    refuse(T5ForConditionalGeneration(config), "T5ForConditionalGeneration is an encoder-decoder model")


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSequenceClassification], ids=["base", "classifier"])
def test_a_model_without_a_head_over_the_vocabulary(auto: Any) -> None:
    refuse(auto.from_config(tiny_config("llama")), "has no output embeddings, .* AutoModelForCausalLM")


def test_a_model_without_a_cache_argument() -> None:
    refuse(tiny_model("openai-gpt"), "forward of OpenAIGPTLMHeadModel does not take cache")


def test_a_model_that_sees_ahead() -> None:
    refuse(tiny_model("bert", is_decoder=False), "layers 0, 1, 2, 3 of BertLMHeadModel let a token see later ones")


def test_a_model_without_a_list_of_layers() -> None:
    model = tiny_model("llama")
    model.model.layers = nn.ModuleList([*model.model.layers, nn.Identity()])
    refuse(
        model, r"has no list of decoder layers: no ModuleList with as many entries as config.num_hidden_layers \(4\)"
    )


def test_layers_left_out_at_random() -> None:
    refuse(tiny_model("opt", layerdrop=0.1), "config.layerdrop=0.1.*Set it to 0")


class WithoutCache(nn.Module):
    """An attention layer that forgets the cache."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("cache", "past_key_values")}
        return self.attention(*args, **kwargs)


@pytest.mark.parametrize(("layers", "listed"), [((0, 1, 2, 3), "0, 1, 2, 3"), ((2,), "2")], ids=["all", "one"])
def test_layers_that_ignore_the_cache(layers: tuple[int, ...], listed: str) -> None:
    model = tiny_model("llama")
    for index in layers:
        model.model.layers[index].self_attn = WithoutCache(model.model.layers[index].self_attn)
    refuse(model, rf"the layers of LlamaForCausalLM ignore the cache \(layers {listed}\)")


class OwnLoss(LlamaForCausalLM):
    """Computes its loss without `loss_function`."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, labels: Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        output = super().forward(*args, **kwargs)
        loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        return CausalLMOutputWithPast(loss=loss, logits=output.logits)


def test_a_loss_of_its_own() -> None:
    refuse(OwnLoss(tiny_config("llama")), "computes its loss without handing shift_labels and num_items_in_batch")


class TwiceThroughTheLayers(LlamaForCausalLM):
    """Runs every layer two times."""

    @functools.wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, labels: Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        self.model(*args, **kwargs)
        return super().forward(*args, labels=labels, **kwargs)


def test_layers_that_run_twice() -> None:
    refuse(TwiceThroughTheLayers(tiny_config("llama")), r"runs its 4 layers in the order \[0, 1, 2, 3, 0, 1, 2, 3\]")


def test_layers_that_return_different_things() -> None:
    model = tiny_model("bloom")

    class ReturnsMore(type(model.transformer.h[2])):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return (*super().forward(*args, **kwargs), None)

    model.transformer.h[2].__class__ = ReturnsMore
    refuse(model, "the layers of BloomForCausalLM return tuple; a layer that can be run on another stage returns")


class CalledThrough(nn.ModuleList):
    """Layers that their owner calls through a function of the layer, its hidden states and other arguments."""

    call: Callable[..., Any]

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return [functools.partial(self.call, layer) for layer in found] if isinstance(index, slice) else found


def scaled(layer: nn.Module, hidden: Tensor, **kwargs: Any) -> Any:
    return layer(hidden * 2, **kwargs)


def with_hidden_states_of_the_start(layer: nn.Module, hidden: Tensor, **kwargs: Any) -> Any:
    return layer(hidden, skipped=hidden, **kwargs)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (scaled, "what layer 1 is given is not what layer 0 returned"),
        (with_hidden_states_of_the_start, "layer 0 is given more than one tensor with a gradient"),
    ],
)
def test_what_flows_beside_the_hidden_states_allows_one_stage_only(call: Callable[..., Any], reason: str) -> None:
    model = tiny_model("llama")
    model.model.layers.__class__ = CalledThrough
    model.model.layers.call = call
    with pytest.raises(ValueError, match=f"can't be cut into stages between its layers: {reason}.*num_stages=1"):
        cut(model, [0], LAYER_RANGES)
    cut(model, [0], [range(4)])
