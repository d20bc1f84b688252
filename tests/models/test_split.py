"""Cutting a model in place: what stays, what is freed, and how the whole shows again."""

from __future__ import annotations

import copy
import gc
import re
import weakref

import pytest
import torch
from support.staged_run import LAYER_RANGES
from support.tiny_models import tiny_model
from torch import nn
from transformers import PreTrainedModel

from lightning_seq1f1b.models.split import Split, cut
from lightning_seq1f1b.models.stubs import Stub

FAMILIES = ("llama", "gpt2", "opt", "gemma2", "bloom")
STAGES = range(len(LAYER_RANGES))


def cut_copy(model: PreTrainedModel, stage: int) -> Split:
    return cut(copy.deepcopy(model), [stage], LAYER_RANGES)


def shapes(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in model.state_dict(keep_vars=True).items()]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_stays_on_one_stage_or_tied_on_both_ends(family: str, tied: bool) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    shared = [name for name, p in model.named_parameters() if tied and p is model.get_input_embeddings().weight]
    assert len(shared) == tied
    stages: dict[str, list[int]] = {name: [] for name, _ in model.named_parameters()}
    for stage in STAGES:
        split = cut_copy(model, stage)
        assert list(split.tied) == shared
        for name, parameter in split.model.named_parameters():
            torch.testing.assert_close(parameter, model.get_parameter(name), rtol=0, atol=0)
            stages[name].append(stage)
    for name, where in stages.items():
        assert where == [0, 2] if name in shared else len(where) == 1


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_inside_whole_all_names_show_and_outside_only_the_stage_is_left(family: str, stage: int) -> None:
    model = tiny_model(family)
    split = cut_copy(model, stage)
    own = dict(split.model.named_parameters())
    before = shapes(split.model)
    with split.whole():
        assert shapes(split.model) == shapes(model)
        assert [name for name, _ in split.model.named_parameters()] == [name for name, _ in model.named_parameters()]
        for name, parameter in split.model.named_parameters():
            assert parameter is own[name] if name in own else parameter.is_meta
        with split.whole():
            assert shapes(split.model) == shapes(model)
    assert shapes(split.model) == before
    assert all(split.model.get_parameter(name) is parameter for name, parameter in own.items())


def test_whole_ends_after_an_error() -> None:
    split = cut_copy(tiny_model("llama"), 1)
    before = shapes(split.model)
    with pytest.raises(KeyError), split.whole():
        raise KeyError
    assert shapes(split.model) == before


@pytest.mark.parametrize("stage", STAGES)
def test_tied_embeddings_stay_one_object(stage: int) -> None:
    split = cut_copy(tiny_model("llama", tie_word_embeddings=True), stage)
    assert split.tied == ("model.embed_tokens.weight",)
    with split.whole():
        head, embedding = split.model.get_output_embeddings().weight, split.model.get_input_embeddings().weight
        assert head is embedding
        assert head.is_meta == (stage == 1)


@pytest.mark.parametrize("stage", STAGES)
def test_the_memory_of_other_stages_is_freed(stage: int) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    alive = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    cut(model, [stage], LAYER_RANGES)
    gc.collect()
    left = {name for name, parameter in alive.items() if parameter() is not None}
    assert left == {name for name, _ in model.named_parameters()}
    assert left < alive.keys()


def test_modules_that_user_code_holds_hold_no_memory_either() -> None:
    model = tiny_model("llama")
    head = model.lm_head
    cut(model, [0], LAYER_RANGES)
    assert head.weight.is_meta


def test_frozen_parameters_stay_frozen_in_the_whole_view() -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[2].mlp.requires_grad_(False)
    split = cut_copy(model, 2)
    with split.whole():
        for name, parameter in split.model.named_parameters():
            assert parameter.requires_grad == model.get_parameter(name).requires_grad
        split.model.model.layers[0].requires_grad_(False)
    with split.whole():
        assert not any(parameter.requires_grad for parameter in split.model.model.layers[0].parameters())


def test_one_stage_keeps_everything() -> None:
    model = tiny_model("gpt2")
    own = dict(model.named_parameters())
    split = cut(model, [0], [range(4)])
    assert split.holds_first
    assert split.holds_last
    assert split.tied == ()
    assert all(parameter is own[name] for name, parameter in model.named_parameters())


def test_a_model_that_is_on_the_meta_device_can_be_cut() -> None:
    model = tiny_model("llama").to("meta")
    split = cut(model, [1], LAYER_RANGES)
    assert {name.split(".")[2] for name, _ in split.model.named_parameters()} == {"1", "2"}


# ---- several stages on one rank ------------------------------------------------------------------------------------

FOUR = (range(1), range(1, 2), range(2, 3), range(3, 4))


def shown(split: Split) -> list[str]:
    """Names of layers and of the modules beside them that show, and are no stubs."""
    beside = ("embed_tokens", "norm", "lm_head")
    names = [name.rpartition(".")[2] for name, module in split.model.named_modules() if not isinstance(module, Stub)]
    return sorted(name for name in names if name.isdigit() or name in beside)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True), ("opt", True)])
def test_of_two_stages_on_a_rank_all_parameters_stay(family: str, tied: bool) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    one_each = [set(dict(cut(copy.deepcopy(model), [stage], FOUR).model.named_parameters())) for stage in range(4)]
    for stages in ([0, 2], [1, 3]):
        split = cut(copy.deepcopy(model), stages, FOUR)
        own = dict(split.model.named_parameters())
        assert set(own) == one_each[stages[0]] | one_each[stages[1]]
        assert not any(parameter.is_meta for parameter in own.values())
        assert (split.holds_first, split.holds_last) == (0 in stages, 3 in stages)
        assert len(split.tied) == tied
        with split.whole():
            assert shapes(split.model) == shapes(model)
            assert all(split.model.get_parameter(name) is parameter for name, parameter in own.items())
        assert set(dict(split.model.named_parameters())) == set(own)


def test_where_both_ends_are_on_a_rank_tied_embeddings_are_one_parameter() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    split = cut(model, [0, 3], FOUR)
    assert split.tied == ()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with split.only(0):
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_while_one_stage_runs_the_others_are_hidden() -> None:
    split = cut(tiny_model("llama"), [0, 2, 3], FOUR)
    everything = ["0", "2", "3", "embed_tokens", "lm_head", "norm"]
    assert shown(split) == everything
    for index, expected in ((0, ["0", "embed_tokens"]), (2, ["2"]), (3, ["3", "lm_head", "norm"])):
        with split.only(index):
            assert shown(split) == expected
            assert split.model.model.layers[1].hidden_size == 32
            assert [child for child, _ in split.model.model.layers.named_children()] == ["0", "1", "2", "3"]
        assert shown(split) == everything
    with pytest.raises(KeyError), split.only(2):
        raise KeyError
    assert shown(split) == everything


def test_the_memory_of_stages_on_other_ranks_is_freed() -> None:
    model = tiny_model("llama")
    layers = list(model.model.layers)
    cut(model, [1, 3], FOUR)
    assert [any(parameter.is_meta for parameter in layer.parameters()) for layer in layers] == [True, False] * 2


# ---- what cannot be cut --------------------------------------------------------------------------------------------


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match=r"5 stages for the 4 layers of LlamaForCausalLM.*use 4 stages or less"):
        cut(tiny_model("llama"), [0], [range(index, index + 1) for index in range(5)])


@pytest.mark.parametrize("ranges", [[range(1), range(2, 4)], [range(2), range(2), range(2, 4)], [range(2), range(0)]])
def test_ranges_that_do_not_share_out_the_layers(ranges: list[range]) -> None:
    with pytest.raises(ValueError, match="do not share out layers 0 to 3"):
        cut(tiny_model("llama"), [0], ranges)


@pytest.mark.parametrize("indices", [[3], [-1], [], [1, 0], [0, 0], [0, 3]])
def test_stages_that_do_not_exist_or_are_in_disorder(indices: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(str(indices))} are not some of 0 to 2, each once and in order"):
        cut(tiny_model("llama"), indices, LAYER_RANGES)


def test_a_model_that_was_cut_before() -> None:
    model = tiny_model("llama")
    cut(model, [0], LAYER_RANGES)
    with pytest.raises(ValueError, match="has been cut into stages before"):
        cut(model, [0], LAYER_RANGES)


def test_weights_shared_between_layers_of_different_stages() -> None:
    model = tiny_model("llama")
    model.model.layers[3].mlp = model.model.layers[0].mlp
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj\.weight .* would be on stages 0, 2"):
        cut(model, [0], LAYER_RANGES)


def test_a_parameter_beside_all_modules() -> None:
    model = tiny_model("llama")
    model.model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"model\.scale .* would be on stages 0, 1, 2"):
        cut(model, [0], LAYER_RANGES)
    cut(model, [0], [range(4)])


def test_nothing_is_changed_by_a_refusal() -> None:
    model = tiny_model("llama")
    model.model.layers[3].mlp = model.model.layers[0].mlp
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="would be on stages"):
        cut(model, [1], LAYER_RANGES)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not any(parameter.is_meta for parameter in before.values())
