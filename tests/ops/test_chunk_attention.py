"""The door to all kernels against the slow twin: options, layouts, what is kept and refused, which way it takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import assert_twins, inputs, with_gradients

from lightning_seq1f1b.ops import attention, library, notice
from lightning_seq1f1b.ops.attention import chunk_attention
from lightning_seq1f1b.ops.reference import reference_attention
from lightning_seq1f1b.ops.visibility import Visibility


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
    tensors = inputs(tokens, prefix + tokens, rows=rows, heads=kv_heads * groups, kv_heads=kv_heads, size=size)
    assert_twins(chunk_attention, *tensors)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 20), prefix=st.integers(0, 30), window=st.integers(1, 60), kv_heads=st.sampled_from([1, 4])
)
def test_windows(tokens: int, prefix: int, window: int, kv_heads: int) -> None:
    assert_twins(chunk_attention, *inputs(tokens, prefix + tokens, kv_heads=kv_heads), visible=Visibility(window))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"mask"}, {"bias"}, {"mask", "bias"}, {"softcap"}, {"sinks"}, {"softcap", "sinks"}, {"mask", "sinks"}],
    ids=lambda options: " ".join(sorted(options)),
)
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
    assert_twins(chunk_attention, *inputs(7, 12), causal=causal, **{name: values[name] for name in options})


@pytest.mark.parametrize("softcap", [None, 0.8])
def test_a_bias_and_sinks_get_gradients(softcap: float | None) -> None:
    query, key, value = inputs(7, 12)
    bias = torch.randn(1, 4, 7, 12, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    for further in ({"bias": bias}, {"sinks": sinks}, {"bias": bias, "sinks": sinks}):
        tensors = (query, key, value, *further.values())
        options = {"scale": 0.3, "softcap": softcap, **further}
        got = with_gradients(lambda given=options: chunk_attention(query, key, value, **given), *tensors)
        expected = with_gradients(lambda given=options: reference_attention(query, key, value, **given), *tensors)
        for actual, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def test_values_of_another_size_than_keys() -> None:
    assert_twins(chunk_attention, *inputs(7, 12, size=8, value_size=5))


@pytest.mark.parametrize("softcap", [None, 0.8])
def test_documents_and_padding(softcap: float | None) -> None:
    """Two documents in the first row, their border inside the chunk; padding at the left of the second."""
    first_key = torch.tensor([[0, 0, 0, 0, 8, 8, 8], [0] * 7], dtype=torch.int32)
    key_mask = torch.ones(2, 12, dtype=torch.bool)
    key_mask[1, :3] = False
    assert_twins(chunk_attention, *inputs(7, 12), visible=Visibility(6, first_key, key_mask), softcap=softcap)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": torch.zeros(4).double()}], ids=str)
def test_queries_that_see_nothing_give_zero_and_no_nan(options: dict[str, object]) -> None:
    key_mask = torch.ones(2, 6, dtype=torch.bool)
    key_mask[1, :4] = False
    for seen in ({"visible": Visibility(key_mask=key_mask)}, {"mask": key_mask[:, None, None]}):
        query, key, value = inputs(4, 6)
        output = chunk_attention(query, key, value, **seen, **options)
        assert not output[1, :, :2].any()
        assert output[1, :, 2:].all()
        for gradient in torch.autograd.grad(output.sum(), (query, key, value)):
            assert torch.isfinite(gradient).all()


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    query, key, value = (tensor.detach() for tensor in inputs(5, 9))
    mean = torch.stack([chunk_attention(query, key, value, dropout=0.3) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(mean, chunk_attention(query, key, value), rtol=0, atol=0.1)


def test_memory_layouts() -> None:
    """Kernels take the entries of a head for neighbours; other layouts must not reach them."""
    query, key, value = inputs(6, 11)
    transposed = tuple(t.detach().mT.contiguous().mT.requires_grad_() for t in (query, key, value))
    assert transposed[0].stride(-1) != 1
    assert_twins(chunk_attention, *transposed)
    buffer = torch.zeros(2, 2, 40, 8, dtype=torch.float64)
    buffer[:, :, 3:14] = key.detach()
    assert_twins(chunk_attention, query, buffer[:, :, 3:14].requires_grad_(), value)


def test_a_gradient_that_is_expanded_from_one_number() -> None:
    query, key, value = inputs(6, 11)
    got = torch.autograd.grad(chunk_attention(query, key, value).sum(), (query, key, value))
    expected = torch.autograd.grad(reference_attention(query, key, value, scale=8**-0.5).sum(), (query, key, value))
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def test_the_output_is_laid_out_as_layers_want_it() -> None:
    """Heads inside tokens, so that merging the heads needs no copy."""
    assert chunk_attention(*inputs(6, 11)).transpose(1, 2).is_contiguous()


def test_what_is_kept_for_the_backward_does_not_grow_with_the_square() -> None:
    """Inputs, output and one number per query; not a byte for masks, weights or expanded heads."""
    query, key, value = inputs(32, 96, rows=1, heads=8, kv_heads=2, size=16, dtype=torch.float32)
    for options in ({}, {"softcap": 1.0}, {"sinks": torch.zeros(8)}):
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = chunk_attention(query, key, value, **options)
        own = query.nbytes + key.nbytes + value.nbytes + output.nbytes + 4 * 8 * 32
        assert sum(kept.values()) <= own + sum(t.nbytes for t in options.values() if isinstance(t, torch.Tensor))
        assert {query.data_ptr(), key.data_ptr(), value.data_ptr()} <= kept.keys()


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, "kernel_attention"),
        ({"visible": Visibility(11)}, "kernel_attention"),
        ({"softcap": 1.0}, "kernel_attention"),
        ({"sinks": torch.zeros(4)}, "kernel_attention"),
        ({"dropout": 0.1}, "masked_attention"),
        ({"causal": False}, "masked_attention"),
        ({"causal": False, "softcap": 1.0}, "reference_attention"),
    ],
    ids=str,
)
def test_which_way_is_taken(options: dict[str, object], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name in ("kernel_attention", "masked_attention", "reference_attention"):
        monkeypatch.setattr(attention, name, lambda *args, name=name, **kwargs: taken.append(name))
    chunk_attention(*inputs(7, 12), **options)
    assert taken == [chosen]


def test_a_slower_way_is_said_once_and_why() -> None:
    notice.say_once.cache_clear()
    with pytest.warns(UserWarning, match="exactly but slower.*attention dropout") as said:
        [chunk_attention(*inputs(7, 12), dropout=0.1) for _ in range(3)]
    assert len(said) == 1


def test_it_is_said_on_the_first_rank_of_a_node_only(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    notice.say_once.cache_clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    chunk_attention(*inputs(7, 12), dropout=0.1)
    assert not recwarn.list
    notice.say_once.cache_clear()


def test_without_gradients_nothing_is_kept() -> None:
    query, key, value = inputs(6, 11)
    with torch.no_grad():
        output = chunk_attention(query, key, value, scale=0.3)
    assert output.grad_fn is None
    torch.testing.assert_close(output, reference_attention(query, key, value, scale=0.3), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 4, 5), (2, 4, 5), (2, 4, 5)), r"are \[rows, heads, tokens, size\]"),
        (((2, 4, 5, 8), (2, 2, 9, 6), (2, 2, 9, 6)), "do not fit together"),
        (((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 8, 8)), "do not fit together"),
        (((2, 4, 5, 8), (2, 3, 9, 8), (2, 3, 9, 8)), "4 heads are no multiple of 3 KV heads"),
        (((2, 4, 5, 8), (2, 2, 4, 8), (2, 2, 4, 8)), "fewer keys than queries"),
        (((2, 4, 0, 8), (2, 2, 4, 8), (2, 2, 4, 8)), "must not be empty"),
        (((2, 4, 4, 8), (2, 0, 4, 8), (2, 0, 4, 8)), "must not be empty"),
    ],
    ids=["dimensions", "sizes", "lengths", "heads", "keys", "no queries", "no heads"],
)
def test_inputs_that_do_not_fit(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunk_attention(*(torch.zeros(shape) for shape in shapes))


def test_dtypes_and_devices_that_differ() -> None:
    query, key, value = inputs(5, 9)
    with pytest.raises(ValueError, match=r"differ in dtype: torch.float64, torch.float32, torch.float64"):
        chunk_attention(query, key.float(), value)
    with pytest.raises(ValueError, match=r"of a floating dtype, not torch.int64"):
        chunk_attention(query.long(), key.long(), value.long())
    with pytest.raises(ValueError, match=r"on different devices: cpu, cpu, meta"):
        chunk_attention(query, key, value.to("meta"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 0.0}, "softcap is positive, or None for no cap, not 0.0"),
        ({"softcap": -1.0}, "softcap is positive"),
        ({"softcap": float("nan")}, "softcap is positive"),
        ({"sinks": torch.zeros(3)}, r"one floating number a head, \[4\] on cpu, not \[3\] torch.float32 on cpu"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, r"one floating number a head, .* not \[4\] torch.int64"),
        ({"visible": Visibility(0)}, "1 or more keys, not 0"),
        (
            {"visible": Visibility(first_key=torch.zeros(2, 9, dtype=torch.int32))},
            r"first_key is \[2, 5\] torch.int32 on cpu, not \[2, 9\] torch.int32 on cpu",
        ),
        (
            {"visible": Visibility(first_key=torch.zeros(2, 5, dtype=torch.int64))},
            r"first_key is .* not \[2, 5\] torch.int64",
        ),
        ({"visible": Visibility(key_mask=torch.ones(2, 9))}, r"key_mask is \[2, 9\] torch.bool on cpu, not .*float32"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunk_attention(*inputs(5, 9), **options)


def test_a_second_derivative_is_refused() -> None:
    """Also where the gradient that comes in is a constant, which autograd itself lets pass."""
    query, key, value = inputs(5, 9)
    for computed in (chunk_attention, lambda *given: library.attend(*given, 0.3, 0, 0.0, None, None)[0]):
        with pytest.raises(RuntimeError, match=r"no second derivative.*create_graph=True"):
            torch.autograd.grad(computed(query, key, value).sum(), query, create_graph=True)


def test_no_rows() -> None:
    tensors = [tensor.detach()[:0].requires_grad_() for tensor in inputs(5, 9)]
    chunk_attention(*tensors).sum().backward()
    assert [tensor.grad.shape for tensor in tensors] == [tensor.shape for tensor in tensors]


def test_queries_that_see_everything_may_be_more_than_the_keys() -> None:
    assert_twins(chunk_attention, *inputs(9, 5), causal=False)
