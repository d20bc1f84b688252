"""Every kernel against the slow twin, with every option it says it has; and which kernel a call gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import assert_twins, inputs, with_gradients
from torch import Tensor

from lightning_seq1f1b.ops import flash, native
from lightning_seq1f1b.ops.attend import attend
from lightning_seq1f1b.ops.kernels import MERGED, NATIVE, PLAIN, Call, Kernel, choose, explain
from lightning_seq1f1b.ops.reference import reference_attention
from lightning_seq1f1b.ops.scores import Scores
from lightning_seq1f1b.ops.visibility import Visibility

CPU_KERNELS = {"plain": (PLAIN, ""), "merged": (MERGED, "")} | {name: (NATIVE, name) for name in native.cpu_variants()}


def test_the_extension_is_built() -> None:
    assert native.available(), native.reason()
    assert native.cpu_variants()[0] == "generic"


@pytest.fixture(params=CPU_KERNELS.values(), ids=CPU_KERNELS, scope="module")
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    chosen, variant = request.param
    native.use_cpu_variant(variant)
    yield chosen
    native.use_cpu_variant("")


def attention(kernel: Kernel):
    def computed(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        visible: Visibility | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        scores = Scores(scale, softcap, visible or Visibility())
        return attend(query, key, value, sinks, kernel, scores, None)

    return computed


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, object]]:
    """Sizes and options; queries that see no key among them."""
    rows, kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    tokens, prefix = draw(st.integers(1, 70)), draw(st.one_of(st.just(0), st.integers(0, 300)))
    shape = {"tokens": tokens, "keys": prefix + tokens, "rows": rows, "heads": kv_heads * groups, "kv_heads": kv_heads}
    shape |= {
        "size": draw(st.integers(1, 80)),
        "value_size": draw(st.integers(1, 80)),
        "seed": draw(st.integers(0, 99)),
    }
    generator = torch.Generator().manual_seed(shape["seed"])
    first_key = key_mask = None
    if draw(st.booleans()):
        first_key = torch.randint(0, prefix + tokens + 2, (rows, tokens), generator=generator, dtype=torch.int32)
    if draw(st.booleans()):
        key_mask = torch.rand(rows, prefix + tokens, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.9]))
    visible = Visibility(draw(st.one_of(st.none(), st.integers(1, 200))), first_key, key_mask)
    return shape, {"visible": visible, "softcap": draw(st.sampled_from([None, 0.7, 30.0]))}


def without(kernel: Kernel, shape: dict[str, int], options: dict[str, object]) -> None:
    """Leave out what a kernel says it has not."""
    if kernel is MERGED:
        options |= {"visible": Visibility(), "softcap": None}
        shape["value_size"] = shape["size"]
    scores = Scores(0.3, options["softcap"], options["visible"])
    call = Call("cpu", torch.float64, shape["size"], shape["value_size"], shape["keys"], scores)
    assert kernel.lacks(call) is None


@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_it_is_the_twin_in_float64(kernel: Kernel, problem: tuple[dict[str, int], dict[str, object]]) -> None:
    shape, options = problem
    without(kernel, shape, options)
    assert_twins(attention(kernel), *inputs(**shape), tolerance=1e-11, **options)


@settings(max_examples=25, deadline=None)
@given(problem=problems(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_its_error_in_lower_precision_is_rounding(
    kernel: Kernel, problem: tuple[dict[str, int], dict[str, object]], dtype: torch.dtype
) -> None:
    """Against float64 on the same numbers: roundings of the largest entry, or of the products that cancel in it."""
    shape, options = problem
    without(kernel, shape, options)
    tensors = inputs(**shape, dtype=dtype)
    exact = tuple(tensor.detach().double().requires_grad_() for tensor in tensors)
    truth = with_gradients(lambda: reference_attention(*exact, scale=0.3, **options), *exact)
    got = with_gradients(lambda: attention(kernel)(*tensors, scale=0.3, **options), *tensors)
    for actual, wanted in zip(got, truth, strict=True):
        error, largest = (actual.double() - wanted).abs().max(), wanted.abs().max().clamp(min=16)
        assert error <= 16 * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("softcap", [None, 0.9])
def test_sinks(kernel: Kernel, softcap: float | None) -> None:
    if kernel is MERGED and softcap is not None:
        assert kernel.lacks(Call("cpu", torch.float64, 8, 8, 12, Scores(0.3, softcap))) == "no soft-cap"
        return
    tensors = (*inputs(7, 12), torch.linspace(-2, 3, 4, dtype=torch.float64).requires_grad_())
    options = {"scale": 0.3, "softcap": softcap, "sinks": tensors[3]}
    got = with_gradients(lambda: attention(kernel)(*tensors[:3], **options), *tensors)
    expected = with_gradients(lambda: reference_attention(*tensors[:3], **options), *tensors)
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_threads_only_share_the_work(dtype: torch.dtype, kv_heads: int, kernel: Kernel) -> None:
    """The same bits every time; with another number of threads at most another rounding."""
    tensors = inputs(150, 400, rows=1, kv_heads=kv_heads, size=40, dtype=dtype)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3, 3):
        torch.set_num_threads(threads)
        results.append(with_gradients(lambda: attention(kernel)(*tensors, scale=0.2), *tensors))
    torch.set_num_threads(before)
    for one, first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
        assert (one - first).abs().max() <= 16 * torch.finfo(dtype).eps * one.abs().max()


PLAIN_CALL = Scores(0.3)
DOCUMENTS = Scores(0.3, visible=Visibility(first_key=torch.zeros(1, 1, dtype=torch.int32)))


@pytest.mark.parametrize(
    ("device_type", "dtype", "size", "scores", "chosen"),
    [
        ("cpu", torch.float32, 64, PLAIN_CALL, "lightning_seq1f1b"),
        ("cpu", torch.bfloat16, 80, DOCUMENTS, "lightning_seq1f1b"),
        ("cuda", torch.bfloat16, 64, PLAIN_CALL, "torch flash"),
        ("cuda", torch.float16, 128, Scores(0.3, visible=Visibility(9)), "torch flash"),
        ("cuda", torch.bfloat16, 84, PLAIN_CALL, None),
        ("cuda", torch.bfloat16, 64, DOCUMENTS, None),
        ("cuda", torch.bfloat16, 64, Scores(0.3, softcap=2.0), None),
        ("cuda", torch.bfloat16, 320, PLAIN_CALL, None),
        ("cuda", torch.float32, 64, PLAIN_CALL, None),
        ("mps", torch.float32, 64, PLAIN_CALL, None),
    ],
    ids=str,
)
def test_the_fastest_kernel_that_has_everything_is_chosen(
    device_type: str,
    dtype: torch.dtype,
    size: int,
    scores: Scores,
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device_type == "cuda":
        monkeypatch.setattr(native, "available", lambda: False)
        monkeypatch.setattr(native, "reason", lambda: "not built")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(flash, "flash_attn_2", lambda: None)
        monkeypatch.setattr(flash, "flash_attn_3", lambda: None)
    kernel = choose(Call(device_type, dtype, size, size, 100, scores))
    assert (kernel and kernel.name) == chosen


def test_without_the_extension_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "reason", lambda: "nobody built it")
    assert choose(Call("cpu", torch.float32, 64, 64, 9, PLAIN_CALL)) is MERGED
    assert choose(Call("cpu", torch.float32, 64, 64, 9, DOCUMENTS)) is None
    assert explain("cpu", torch.float32) == [("lightning_seq1f1b", "nobody built it"), (MERGED.name, None)]
