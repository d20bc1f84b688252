"""Where models keep their layers, and what stands beside them."""

from __future__ import annotations

import pytest
from support.tiny_models import tiny_model
from torch import nn

from lightning_seq1f1b.models.trunk import find_trunk


@pytest.mark.parametrize(
    ("family", "name", "attribute"),
    [
        ("llama", "model", "layers"),
        ("gpt2", "transformer", "h"),
        ("opt", "model.decoder", "layers"),
        ("gpt_neox", "gpt_neox", "layers"),
        ("mpt", "transformer", "blocks"),
    ],
)
def test_the_layers_are_found(family: str, name: str, attribute: str) -> None:
    model = tiny_model(family)
    trunk = find_trunk(model)
    assert (trunk.name, trunk.attribute) == (name, attribute)
    assert trunk.layers is getattr(model.get_submodule(name), attribute)
    assert len(trunk.layers) == 4


def test_a_list_of_other_modules_with_as_many_entries_is_not_taken_for_them() -> None:
    model = tiny_model("llama")
    model.heads = nn.ModuleList(nn.Linear(500, 500) for _ in range(4))
    assert find_trunk(model).attribute == "layers"


def test_siblings_and_layers_are_the_whole_model() -> None:
    model = tiny_model("opt")
    trunk = find_trunk(model)
    siblings = {full_name: parent.get_submodule(name) for parent, name, full_name in trunk.siblings()}
    assert siblings.keys() == {
        "lm_head",
        *(f"model.decoder.{name}" for name, _ in model.model.decoder.named_children() if name != "layers"),
    }
    parameters = {p for module in (*siblings.values(), trunk.layers) for p in module.parameters()}
    assert parameters == set(model.parameters())
