"""Sums of many small gradients in low precision against the sum in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_seq1f1b.runtime.linear_layers import linear_layers
from lightning_seq1f1b.runtime.split_backward import DeferredGradients, SplitBackward
from lightning_seq1f1b.runtime.wide_gradients import WideGradients

LOW = [torch.bfloat16, torch.float16]


def parts_of(number: int, *shape: int) -> Tensor:
    return torch.rand(number, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("dtype", LOW)
def test_autograd_rounds_no_sum(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(50, dtype=dtype))
    parts = parts_of(300, 50).to(dtype)
    wide = WideGradients([parameter, parameter])
    wide.begin()
    for part in parts:
        (parameter * part).sum().backward()
    assert parameter.grad.dtype == torch.float32
    torch.testing.assert_close(parameter.grad.double(), parts.double().sum(0), rtol=1e-6, atol=0)
    wide.end()
    # Which a sum in the parameter's own dtype, as autograd's usual one, would miss by far.
    for part in parts:
        (parameter * part).sum().backward()
    assert parameter.grad.dtype == dtype
    assert float((parameter.grad.double() - parts.double().sum(0)).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", LOW)
def test_deferred_products_round_no_sum(dtype: torch.dtype) -> None:
    layer = nn.Linear(5, 3).to(dtype)
    values, gradients = parts_of(200, 4, 5).to(dtype), parts_of(200, 4, 3).to(dtype)
    split = SplitBackward(linear_layers(layer))
    WideGradients(layer.parameters()).begin()
    for value, gradient in zip(values, gradients, strict=True):
        deferred = DeferredGradients()
        with split.deferring(deferred):
            layer(value.clone().requires_grad_()).backward(gradient)
        deferred.accumulate()
    wanted = torch.einsum("nto,nti->oi", gradients.double(), values.double())
    # Each product is rounded once, its rounding errors have both signs.
    torch.testing.assert_close(layer.weight.grad.double(), wanted, rtol=1e-3, atol=0)
    torch.testing.assert_close(layer.bias.grad.double(), gradients.double().sum((0, 1)), rtol=1e-6, atol=0)


def test_what_needs_no_sum_is_left_alone() -> None:
    wide_one = nn.Parameter(torch.zeros(1))
    frozen = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16), requires_grad=False)
    chosen, any_dtype = (nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)) for _ in range(2))
    chosen.grad_dtype, any_dtype.grad_dtype = torch.float32, None
    wide = WideGradients([wide_one, frozen, chosen, any_dtype])
    wide.begin()
    (wide_one + chosen).sum().backward()
    wide.end()
    assert float(wide_one.grad) == float(chosen.grad) == 1.0
    assert frozen.grad is None
    assert [p.grad_dtype for p in (wide_one, frozen, chosen, any_dtype)] == [
        torch.float32,
        torch.bfloat16,
        torch.float32,
        None,
    ]
