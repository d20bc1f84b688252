"""Every way of computing attention against the slow twin, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import inputs
from torch import Tensor

from lightning_seq1f1b.ops import attention, merged
from lightning_seq1f1b.ops.attention import chunk_attention
from lightning_seq1f1b.ops.merged import merged_attention
from lightning_seq1f1b.ops.reference import reference_attention


def with_gradients(compute: Callable[[], Tensor], *tensors: Tensor) -> list[Tensor]:
    """The output, and the gradients of a fixed random projection of it."""
    output = compute()
    projection = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output, *torch.autograd.grad((output * projection.to(output.dtype)).sum(), tensors)]


def assert_twins(query: Tensor, key: Tensor, value: Tensor, tolerance: float = 1e-12, **options: object) -> None:
    tensors = (query, key, value)
    got = with_gradients(lambda: chunk_attention(*tensors, scale=0.3, **options), *tensors)
    expected = with_gradients(lambda: reference_attention(*tensors, scale=0.3, **options), *tensors)
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 40),
    prefix=st.integers(0, 70),
    kv_heads=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 2, 4]),
    size=st.integers(1, 40),
    rows=st.integers(1, 3),
)
def test_plain_causal_attention(tokens: int, prefix: int, kv_heads: int, groups: int, size: int, rows: int) -> None:
    assert_twins(*inputs(tokens, prefix + tokens, rows=rows, heads=kv_heads * groups, kv_heads=kv_heads, size=size))


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 20), prefix=st.integers(0, 30), window=st.integers(1, 60), kv_heads=st.sampled_from([1, 4])
)
def test_windows(tokens: int, prefix: int, window: int, kv_heads: int) -> None:
    assert_twins(*inputs(tokens, prefix + tokens, kv_heads=kv_heads), window=window)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", [{"mask"}, {"bias"}, {"mask", "bias"}, {"softcap"}, {"sinks"}], ids=str)
def test_options(options: set[str], causal: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(2, 1, 7, 12, generator=generator) < 0.7
    mask[..., 0] = True
    values = {
        "mask": mask,
        "bias": torch.randn(1, 4, 7, 12, generator=generator, dtype=torch.float64),
        "softcap": 0.8,
        "sinks": torch.randn(4, generator=generator, dtype=torch.float64),
    }
    assert_twins(*inputs(7, 12), causal=causal, **{name: values[name] for name in options})


def test_a_bias_and_sinks_get_gradients() -> None:
    query, key, value = inputs(7, 12)
    bias = torch.randn(1, 4, 7, 12, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for further in ({"bias": bias}, {"sinks": sinks}, {"bias": bias, "sinks": sinks}):
        tensors = (query, key, value, *further.values())
        got = with_gradients(lambda given=further: chunk_attention(query, key, value, scale=0.3, **given), *tensors)
        expected = with_gradients(
            lambda given=further: reference_attention(query, key, value, scale=0.3, **given), *tensors
        )
        for actual, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def test_values_of_another_size_than_keys() -> None:
    assert_twins(*inputs(7, 12, size=8, value_size=5))


def test_rows_that_see_nothing_give_zero_and_no_nan() -> None:
    query, key, value = inputs(4, 6)
    mask = torch.ones(2, 1, 4, 6, dtype=torch.bool)
    mask[1, :, :2] = False
    output = chunk_attention(query, key, value, mask=mask)
    assert not output[1, :, :2].any()
    gradients = torch.autograd.grad(output.sum(), (query, key, value))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    query, key, value = (tensor.detach() for tensor in inputs(5, 9))
    mean = torch.stack([chunk_attention(query, key, value, dropout=0.3) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, chunk_attention(query, key, value), rtol=0, atol=0.1)


def test_memory_layouts() -> None:
    """The kernel takes rows for contiguous; other layouts must not reach it."""
    query, key, value = inputs(6, 11)
    transposed = tuple(t.detach().mT.contiguous().mT.requires_grad_() for t in (query, key, value))
    assert transposed[0].stride(-1) != 1
    assert_twins(*transposed)
    buffer = torch.zeros(2, 2, 40, 8, dtype=torch.float64)
    buffer[:, :, 3:14] = key.detach()
    assert_twins(query, buffer[:, :, 3:14].requires_grad_(), value)


def test_a_gradient_that_is_expanded_from_one_number() -> None:
    query, key, value = inputs(6, 11)
    got = torch.autograd.grad(chunk_attention(query, key, value).sum(), (query, key, value))
    expected = torch.autograd.grad(reference_attention(query, key, value, scale=8**-0.5).sum(), (query, key, value))
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradcheck(kv_heads: int) -> None:
    query, key, value = inputs(3, 5, rows=1, heads=2, kv_heads=kv_heads, size=4)
    assert torch.autograd.gradcheck(lambda *tensors: merged_attention(*tensors, 0.5), (query, key, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_error_in_low_precision_is_like_that_of_torch(dtype: torch.dtype, kv_heads: int) -> None:
    """Against float64, at most twice the error of torch's own attention over the same numbers."""
    tensors = inputs(64, 192, kv_heads=kv_heads, size=32, dtype=dtype)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in tensors)
    truth = with_gradients(lambda: reference_attention(*exact, scale=0.2), *exact)
    ours = with_gradients(lambda: chunk_attention(*tensors, scale=0.2), *tensors)
    mask = torch.ones(64, 192, dtype=torch.bool).tril(128)
    theirs = with_gradients(
        lambda: torch.nn.functional.scaled_dot_product_attention(
            *tensors, attn_mask=mask, scale=0.2, enable_gqa=kv_heads != 4
        ),
        *tensors,
    )
    for actual, other, wanted in zip(ours, theirs, truth, strict=True):
        assert (actual.double() - wanted).norm() <= 2 * (other.double() - wanted).norm()


def test_what_is_kept_for_the_backward_does_not_grow_with_the_square() -> None:
    """Inputs, output and one number per query; not a byte for masks, weights or expanded heads."""
    query, key, value = inputs(32, 96, rows=1, heads=8, kv_heads=2, size=16, dtype=torch.float32)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = chunk_attention(query, key, value)
    assert sum(kept.values()) <= query.nbytes + key.nbytes + value.nbytes + output.nbytes + 4 * 8 * 32
    assert {query.data_ptr(), key.data_ptr(), value.data_ptr()} <= kept.keys()


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, "merged_attention"),
        ({"window": 12}, "merged_attention"),
        ({"window": 11}, "masked_attention"),
        ({"dropout": 0.1}, "masked_attention"),
        ({"causal": False}, "masked_attention"),
        ({"softcap": 1.0}, "reference_attention"),
        ({"sinks": torch.zeros(4)}, "reference_attention"),
    ],
    ids=str,
)
def test_which_way_is_taken(options: dict[str, object], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name in ("merged_attention", "masked_attention", "reference_attention"):
        monkeypatch.setattr(attention, name, lambda *args, name=name, **kwargs: taken.append(name))
    chunk_attention(*inputs(7, 12), **options)
    assert taken == [chosen]


def test_without_gradients_nothing_is_kept() -> None:
    query, key, value = inputs(6, 11)
    with torch.no_grad():
        output = chunk_attention(query, key, value, scale=0.3)
    assert output.grad_fn is None
    torch.testing.assert_close(output, reference_attention(query, key, value, scale=0.3), rtol=0, atol=1e-12)


def test_the_prefix_is_merged_by_the_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix's heads are never expanded: no kernel sees more key-value heads for it than there are."""
    seen = []
    flash = merged._flash

    def watch(query: Tensor, key: Tensor, *args: object, **kwargs: object) -> object:
        seen.append((key.shape[1], key.shape[2]))
        return flash(query, key, *args, **kwargs)

    monkeypatch.setattr(merged, "_flash", watch)
    chunk_attention(*inputs(5, 90, heads=8, kv_heads=2))
    assert sorted(seen) == [(2, 85), (8, 5)]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 4, 5), (2, 4, 5), (2, 4, 5)), r"are \[rows, heads, tokens, size\]"),
        (((2, 4, 5, 8), (2, 2, 9, 6), (2, 2, 9, 6)), "do not fit together"),
        (((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 8, 8)), "do not fit together"),
        (((2, 4, 5, 8), (2, 3, 9, 8), (2, 3, 9, 8)), "4 heads are no multiple of 3 KV heads"),
        (((2, 4, 5, 8), (2, 2, 4, 8), (2, 2, 4, 8)), "fewer keys than queries"),
    ],
    ids=["dimensions", "sizes", "lengths", "heads", "keys"],
)
def test_inputs_that_do_not_fit(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunk_attention(*(torch.zeros(shape) for shape in shapes))


def test_dtypes_that_differ() -> None:
    query, key, value = inputs(5, 9)
    with pytest.raises(ValueError, match=r"differ in dtype: torch.float64, torch.float32, torch.float64"):
        chunk_attention(query, key.float(), value)
