"""Modules on the meta device: copies without data, and modules freed in place."""

from __future__ import annotations

import torch
from support.tiny_models import tiny_model
from torch import nn

from lightning_seq1f1b.models.without_memory import free, meta_copy


def test_a_copy_has_everything_but_data() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.model.layers[1].requires_grad_(False)
    model.model.layers[0].mlp.up_proj = nn.Sequential(model.model.layers[0].mlp.up_proj, nn.Linear(48, 48).double())
    twin = meta_copy(model)
    assert type(twin) is type(model)
    assert twin.config is not model.config
    for (name, tensor), (twin_name, copied) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert name == twin_name
        assert copied.is_meta
        assert (copied.shape, copied.dtype, copied.requires_grad) == (tensor.shape, tensor.dtype, tensor.requires_grad)
    assert all(buffer.is_meta for buffer in twin.buffers())
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_copy_leaves_hooks_and_single_forwards_behind() -> None:
    class Owner:
        def __init__(self) -> None:
            self.lock = open(__file__)  # noqa: SIM115 (something that cannot be copied)

        def hook(self, *_: object) -> None:
            raise AssertionError

    model, owner = tiny_model("llama"), Owner()
    model.model.layers[0].register_forward_hook(owner.hook)
    model.model.layers[0].register_forward_pre_hook(owner.hook)
    model.model.forward = owner.hook
    twin = meta_copy(model)
    owner.lock.close()
    twin.model.layers[0].mlp(torch.zeros(1, 2, 32, dtype=torch.float64, device="meta"))
    assert not twin.model.layers[0]._forward_hooks
    assert "forward" not in vars(twin.model)
    assert model.model.layers[0]._forward_hooks
    assert vars(model.model)["forward"] == owner.hook


def test_tensors_that_are_plain_attributes_become_meta_too() -> None:
    model = tiny_model("llama")
    model.model.table = torch.ones(3)
    assert meta_copy(model).model.table.is_meta


def test_freed_modules_keep_ties_among_themselves_and_to_what_is_kept() -> None:
    one, two, kept = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
    two.weight = one.weight
    two.bias = kept.bias
    one.register_buffer("table", torch.ones(2))
    free([one, two], kept=list(kept.parameters()))
    assert one.weight is two.weight
    assert one.weight.is_meta
    assert one.table.is_meta
    assert two.bias is kept.bias
    assert not kept.bias.is_meta
