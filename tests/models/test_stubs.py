"""What stands in for modules of other stages."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from lightning_seq1f1b.models.stubs import ExitStub, LayerStub, Leaving, PassStub, Stub


def layer() -> nn.Module:
    module = nn.Linear(4, 4)
    module.attention_type = "sliding_attention"
    return module


def test_it_hides_parameters_and_shows_attributes() -> None:
    stub = PassStub(layer())
    assert not list(stub.parameters())
    assert not stub.state_dict()
    assert not list(stub.children())
    assert stub.attention_type == "sliding_attention"
    assert stub.in_features == 4
    assert stub.training
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = stub.no_such_thing
    assert "Linear of another stage" in repr(stub)


@pytest.mark.parametrize("stub", [LayerStub(layer(), None), PassStub(layer()), ExitStub(layer())])
def test_it_can_be_copied(stub: Stub) -> None:
    for twin in (copy.deepcopy(stub), pickle.loads(pickle.dumps(stub))):
        assert twin.attention_type == "sliding_attention"
        assert not list(twin.parameters())


@pytest.mark.parametrize("outputs", [None, 1, 3])
def test_a_layer_hands_on_what_it_is_given(outputs: int | None) -> None:
    hidden = torch.ones(1, 2, 4)
    stub = LayerStub(layer(), outputs)
    for output in (stub(hidden, attention_mask=None), stub(hidden_states=hidden)):
        if outputs is None:
            assert output is hidden
        else:
            assert output[0] is hidden
            assert output[1:] == (None,) * (outputs - 1)


def test_the_layer_behind_a_stage_hands_its_input_out() -> None:
    hidden = torch.ones(1, 2, 4)
    for arguments in ({"args": (hidden,)}, {"kwargs": {"hidden_states": hidden}}):
        with pytest.raises(Leaving) as caught:
            ExitStub(layer())(*arguments.get("args", ()), **arguments.get("kwargs", {}))
        assert caught.value.hidden is hidden


def test_a_norm_or_projection_hands_on_hidden_states() -> None:
    hidden = torch.ones(1, 2, 4)
    assert PassStub(layer())(torch.ones(1, 2).long(), input=hidden) is hidden


@pytest.mark.parametrize("positions", [torch.arange(5)[None], torch.ones(2, 5)])
def test_embedded_positions_are_zero_and_fit_any_shape(positions: Tensor) -> None:
    assert torch.equal(torch.ones(2, 5, 4) + PassStub(layer())(positions), torch.ones(2, 5, 4))
