"""Sums of many small gradients in low precision against the sum in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_seq1f1b.models.wide_gradients import summed_in_float32


def add(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_is_rounded_once(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(50, dtype=dtype))
    parts = torch.rand(300, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    with summed_in_float32([parameter, parameter]) as collect:
        for part in parts:
            add(parameter, part.clone())
            collect()
    assert torch.equal(parameter.grad, parts.double().sum(0).to(dtype))
    # Which rounding every part would miss by far.
    assert not torch.equal(sum(parts, torch.zeros(50, dtype=dtype)), parameter.grad)


def test_it_is_added_to_what_was_there() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    parameter.grad = before = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    with summed_in_float32([parameter]) as collect:
        assert parameter.grad is None
        collect()
        add(parameter, torch.ones(2, dtype=torch.bfloat16))
        collect()
    assert parameter.grad is before
    assert parameter.grad.tolist() == [2.0, 3.0]


def test_what_needs_no_sum_is_left_alone() -> None:
    wide, frozen = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.bfloat16), requires_grad=False)
    wide.grad = torch.ones(1)
    with summed_in_float32([wide, frozen]) as collect:
        add(wide, torch.ones(1))
        collect()
    assert (float(wide.grad), frozen.grad) == (2.0, None)


def test_an_error_puts_back_what_was_there() -> None:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    parameter.grad = torch.ones(1, dtype=torch.bfloat16)
    with pytest.raises(KeyError), summed_in_float32([parameter]):
        raise KeyError
    assert float(parameter.grad) == 1.0
