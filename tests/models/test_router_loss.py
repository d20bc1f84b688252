"""The routers' auxiliary loss from pieces, against transformers' own function on everything at once."""

from __future__ import annotations

import pytest
import torch
from support.float64 import float64_throughout
from support.tiny_models import tiny_model
from transformers.models.mixtral import modeling_mixtral

from lightning_seq1f1b.models.router_loss import RouterLoss, Routers

ROWS, LENGTH, EXPERTS, TOP_K, LAYERS = 2, 12, 5, 2, 3
LOSS = RouterLoss(0.7, EXPERTS, TOP_K)


def mask(padded: bool) -> torch.Tensor | None:
    """Rows of different length."""
    return (torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])) if padded else None


@pytest.mark.parametrize("padded", [False, True])
def test_sums_over_chunks_and_stages_have_the_value_and_gradients_of_the_whole(padded: bool) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(ROWS, LENGTH, EXPERTS, dtype=torch.float64, requires_grad=True) for _ in range(LAYERS)]
    real = mask(padded)
    with float64_throughout():
        flat = tuple(layer.reshape(-1, EXPERTS) for layer in whole)
        expected = 0.7 * modeling_mixtral.load_balancing_loss_func(flat, EXPERTS, TOP_K, real)
    expected.backward()
    cuts = [slice(0, 5), slice(5, 6), slice(6, LENGTH)]
    pieces = [(stage, cut) for stage in (slice(0, 1), slice(1, LAYERS)) for cut in cuts]

    def piece(layer: torch.Tensor, cut: slice) -> torch.Tensor:
        return layer.detach()[:, cut].reshape(-1, EXPERTS)

    def real_in(cut: slice) -> torch.Tensor | None:
        return None if real is None else real[:, cut]

    sums = sum(LOSS.gather([piece(layer, cut) for layer in whole[stage]], real_in(cut)) for stage, cut in pieces)
    torch.testing.assert_close(LOSS.value(sums), expected.detach(), rtol=1e-12, atol=0)
    for layer in whole:
        for cut in cuts:
            gradient = LOSS.gradient(piece(layer, cut), real_in(cut), sums)
            torch.testing.assert_close(gradient, layer.grad[:, cut].reshape(-1, EXPERTS), rtol=1e-10, atol=1e-14)


def test_padding_alone_has_no_loss() -> None:
    logits = [torch.randn(4, EXPERTS)]
    sums = LOSS.gather(logits, torch.zeros(1, 4, dtype=torch.bool))
    assert LOSS.value(sums) == 0
    assert not LOSS.gradient(logits[0], torch.zeros(1, 4, dtype=torch.bool), sums).any()


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "phimoe", "jetmoe", "qwen3_next"]
)
def test_routers_are_found_and_watched(family: str) -> None:
    model = tiny_model(family, torch.float32, output_router_logits=True, router_jitter_noise=0.0)
    loss = RouterLoss.of(model)
    assert loss is not None
    routers = Routers(model, loss)
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    with routers.watching(0, 0, None, begins=True):
        output = model(input_ids=ids, use_cache=False)
    expected = loss.coefficient * output.aux_loss
    routers.complete()
    torch.testing.assert_close(routers.value().float(), expected.detach(), rtol=1e-5, atol=1e-8)
    pairs = list(routers.take(0, 0))
    parameters = [parameter for name, parameter in model.named_parameters() if "gate" in name or "router" in name]
    wanted = torch.autograd.grad(expected, parameters, allow_unused=True, retain_graph=True)
    found = torch.autograd.grad([logits for logits, _ in pairs], parameters, [g for _, g in pairs], allow_unused=True)
    assert any(each is not None and each.abs().max() > 0 for each in wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_another_loss_than_the_usual_one_is_refused() -> None:
    model = tiny_model("doge", torch.float32)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="auxiliary loss cannot be computed over stages and chunks: its"):
        RouterLoss.of(model)


def test_models_that_do_not_ask_for_it_have_none() -> None:
    assert RouterLoss.of(tiny_model("mixtral", torch.float32)) is None
