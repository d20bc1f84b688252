"""Every kernel against the slow twin, with every option it says it has; and which kernel a call gets."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import assert_twins, inputs, with_gradients
from torch import Tensor

from lightning_seq1f1b.ops import flash, kernels, native
from lightning_seq1f1b.ops.kernel_attention import kernel_attention
from lightning_seq1f1b.ops.kernels import (
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    MERGED,
    NATIVE,
    PLAIN,
    TORCH_FLASH,
    Call,
    Kernel,
    choose,
    explain,
)
from lightning_seq1f1b.ops.native import CudaBuild
from lightning_seq1f1b.ops.options import Options
from lightning_seq1f1b.ops.reference import reference_attention
from lightning_seq1f1b.ops.visibility import Visibility

CPU = torch.device("cpu")
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
        options = Options(scale, softcap, visible or Visibility())
        return kernel_attention(query, key, value, sinks, kernel, options, None)

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
    asked = Options(0.3, options["softcap"], options["visible"])
    call = Call(CPU, torch.float64, shape["size"], shape["value_size"], shape["keys"], asked)
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
    # Entries come from sums of up to a few hundred products, of which some nearly cancel.
    roundings, products = (64, 16) if dtype == torch.float32 else (16, 4)
    for actual, wanted in zip(got, truth, strict=True):
        error, largest = (actual.double() - wanted).abs().max(), wanted.abs().max().clamp(min=products)
        assert error <= roundings * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("softcap", [None, 0.9])
def test_sinks(kernel: Kernel, softcap: float | None) -> None:
    if kernel is MERGED and softcap is not None:
        assert kernel.lacks(Call(CPU, torch.float64, 8, 8, 12, Options(0.3, softcap))) == "no soft-cap"
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
    try:
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            results.append(with_gradients(lambda: attention(kernel)(*tensors, scale=0.2), *tensors))
    finally:
        torch.set_num_threads(before)
    for one, first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
        assert (one - first).abs().max() <= 16 * torch.finfo(dtype).eps * one.abs().max()


def test_autocast_changes_nothing_inside(kernel: Kernel) -> None:
    """Its inputs have been cast already; what a kernel computes in between must not be."""
    tensors = inputs(40, 90, dtype=torch.bfloat16)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = attention(kernel)(*tensors, scale=0.3)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), tensors)])
    for without, within in zip(*results, strict=True):
        assert torch.equal(without, within)


PLAIN_CALL = Options(0.3)
WINDOW = Options(0.3, visible=Visibility(9))
SOFTCAP = Options(0.3, softcap=2.0)
DOCUMENTS = Options(0.3, visible=Visibility(first_key=torch.zeros(1, 1, dtype=torch.int32)))
PADDING = Options(0.3, visible=Visibility(key_mask=torch.ones(1, 100, dtype=torch.bool)))


@pytest.mark.parametrize(
    ("dtype", "size", "options"),
    [(torch.float32, 64, PLAIN_CALL), (torch.bfloat16, 80, DOCUMENTS), (torch.float64, 3, SOFTCAP)],
    ids=["plain", "documents", "softcap"],
)
def test_on_the_cpu_the_extension_comes_first(dtype: torch.dtype, size: int, options: Options) -> None:
    assert choose(Call(CPU, dtype, size, size + 1, 100, options)) is NATIVE
    assert choose(Call(torch.device("mps"), dtype, size, size, 100, options)) is None


EVERYTHING = {"flash-attn 3", "flash-attn 2", "torch flash", "extension"}


@pytest.mark.parametrize(
    ("present", "capability", "dtype", "size", "options", "chosen"),
    [
        (EVERYTHING, (9, 0), torch.bfloat16, 64, PLAIN_CALL, FLASH_ATTN_3),
        (EVERYTHING, (8, 0), torch.bfloat16, 64, PLAIN_CALL, FLASH_ATTN_2),
        (EVERYTHING, (10, 0), torch.float16, 128, WINDOW, FLASH_ATTN_2),
        (EVERYTHING - {"flash-attn 2"}, (8, 0), torch.bfloat16, 64, WINDOW, TORCH_FLASH),
        (EVERYTHING - {"flash-attn 2"}, (8, 0), torch.bfloat16, 64, SOFTCAP, NATIVE),
        (EVERYTHING, (9, 0), torch.bfloat16, 64, DOCUMENTS, NATIVE),
        (EVERYTHING, (8, 6), torch.float16, 64, PADDING, NATIVE),
        (EVERYTHING, (9, 0), torch.bfloat16, 84, PLAIN_CALL, NATIVE),
        (EVERYTHING, (12, 0), torch.bfloat16, 84, PLAIN_CALL, NATIVE),
        (EVERYTHING, (9, 0), torch.bfloat16, 320, PLAIN_CALL, None),
        (EVERYTHING, (9, 0), torch.float32, 64, PLAIN_CALL, None),
        (EVERYTHING, (7, 5), torch.float16, 64, PLAIN_CALL, None),
        ({"torch flash"}, (9, 0), torch.bfloat16, 64, DOCUMENTS, None),
        ({"extension"}, (9, 0), torch.bfloat16, 64, PLAIN_CALL, NATIVE),
        (set(), (9, 0), torch.bfloat16, 64, PLAIN_CALL, None),
    ],
)
def test_on_cuda_the_fastest_kernel_that_has_everything_is_chosen(
    present: set[str],
    capability: tuple[int, int],
    dtype: torch.dtype,
    size: int,
    options: Options,
    chosen: Kernel | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = SimpleNamespace(cuda=CudaBuild("13.0", ("80", "90", "100")) if "extension" in present else None)
    monkeypatch.setattr(native, "build_info", lambda: build)
    monkeypatch.setattr(kernels, "_capability", lambda device: capability)
    monkeypatch.setattr(flash, "flash_attn_2", lambda: object() if "flash-attn 2" in present else None)
    monkeypatch.setattr(flash, "flash_attn_3", lambda: object() if "flash-attn 3" in present else None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: "torch flash" in present)
    assert choose(Call(torch.device("cuda"), dtype, size, size, 100, options)) is chosen


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("80", "90"), (8, 0), True),
        (("80", "90"), (8, 9), True),
        (("80", "90"), (12, 0), True),
        (("80", "100"), (9, 0), False),
        (("90",), (8, 0), False),
        (("80", "90a"), (9, 0), True),
        (("80", "90a"), (10, 0), False),
    ],
)
def test_which_gpus_the_extension_was_built_for(
    architectures: tuple[str, ...], capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "build_info", lambda: SimpleNamespace(cuda=CudaBuild("13.0", architectures)))
    monkeypatch.setattr(kernels, "_capability", lambda device: capability)
    lacks = NATIVE.lacks(Call(torch.device("cuda"), torch.bfloat16, 64, 64, 9, PLAIN_CALL))
    assert lacks == (None if runs else f"the extension was built for sm_{', sm_'.join(architectures)}")


def test_without_the_extension_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "reason", lambda: "nobody built it")
    assert choose(Call(CPU, torch.float32, 64, 64, 9, PLAIN_CALL)) is MERGED
    assert choose(Call(CPU, torch.float32, 64, 64, 9, DOCUMENTS)) is None
    assert explain(CPU, torch.float32) == [("lightning_seq1f1b", "nobody built it"), (MERGED.name, None)]
