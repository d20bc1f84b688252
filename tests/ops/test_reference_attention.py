"""The slow twin against the definition written out in loops, and its options against each other."""

from __future__ import annotations

import pytest
import torch
from support.attention_cases import by_loops, inputs

from lightning_seq1f1b.ops.reference import reference_attention
from lightning_seq1f1b.ops.visibility import Visibility


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 3},
        {"first_key": torch.tensor([[0, 0, 6, 6, 6], [2, 3, 3, 3, 8]], dtype=torch.int32)},
        {"key_mask": torch.tensor([[True] * 9, [False, False, *[True] * 5, False, True]])},
        {"softcap": 0.7},
        {"sinks": torch.linspace(-1, 2, 4).double()},
    ],
    ids=lambda options: str(*options),
)
def test_it_is_the_definition(kv_heads: int, options: dict[str, object]) -> None:
    query, key, value = (tensor.detach() for tensor in inputs(5, 9, kv_heads=kv_heads, value_size=6))
    expected = by_loops(query, key, value, 0.4, **options)
    visible = Visibility(**{name: options.pop(name) for name in list(options) if name not in ("softcap", "sinks")})
    torch.testing.assert_close(
        reference_attention(query, key, value, scale=0.4, visible=visible, **options), expected, rtol=0, atol=1e-13
    )


def test_the_last_query_stands_at_the_last_key() -> None:
    mask = Visibility().dense(2, 5, torch.device("cpu"))
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    mask = Visibility(2).dense(2, 5, torch.device("cpu"))
    assert mask[0, 0].int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_a_mask_and_a_bias_say_the_same() -> None:
    query, key, value = inputs(5, 9)
    allowed = torch.rand(2, 1, 5, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    allowed[..., 0] = True
    masked = reference_attention(query, key, value, scale=0.4, mask=allowed)
    biased = reference_attention(query, key, value, scale=0.4, bias=torch.where(allowed, 0.0, -1e30))
    torch.testing.assert_close(masked, biased, rtol=0, atol=1e-13)
    causal = torch.ones(5, 9, dtype=torch.bool).tril(4)
    torch.testing.assert_close(
        masked, reference_attention(query, key, value, scale=0.4, causal=False, mask=allowed & causal), rtol=0, atol=0
    )


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    query, key, value = (tensor.detach() for tensor in inputs(5, 9))
    mean = torch.stack([reference_attention(query, key, value, scale=0.4, dropout=0.3) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, reference_attention(query, key, value, scale=0.4), rtol=0, atol=0.1)


def test_half_precision_is_softmaxed_in_float32() -> None:
    """Large equal scores would round to anything in bfloat16; their weights are still even."""
    query = torch.full((1, 1, 1, 8), 8.0, dtype=torch.bfloat16)
    key = torch.full((1, 1, 300, 8), 8.0, dtype=torch.bfloat16)
    value = torch.ones(1, 1, 300, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(
        reference_attention(query, key, value, scale=1.0), torch.ones(1, 1, 1, 8).bfloat16(), rtol=0, atol=1e-2
    )
