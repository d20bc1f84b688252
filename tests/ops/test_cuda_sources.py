"""The CUDA sources, run on the CPU by csrc/cuda/emulation: the same lines against attention in float64."""

from __future__ import annotations

import math
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.emulated_cuda import CSRC, EmulatedCuda, build_for_all
from torch import Tensor

sys.path.append(str(CSRC))

from building.installed_torch import installed_torch
from building.jobs import compile_jobs
from building.toolchain import ARCHITECTURES_VARIABLE, cpp_compiler, cuda_compiler
from building.toolchain import run as run_compiler

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> EmulatedCuda:
    return EmulatedCuda(build_for_all(tmp_path_factory))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laid_out(tensor: Tensor, order: str = "rhts", offset: int = 0, gap: int = 0, margin: float = math.nan) -> Tensor:
    """A view with the values of `tensor`, laid out in `order` of its letters in memory that holds `margin` elsewhere.

    `offset` elements come before the first, and `gap` between one innermost run and the next.
    """
    places = ["rhts".index(letter) for letter in order]
    shape = [tensor.shape[place] for place in places]
    padded = [*shape[:-1], shape[-1] + gap]
    memory = torch.full((offset + math.prod(padded) + 16,), margin, dtype=tensor.dtype)
    view = memory[offset : offset + math.prod(padded)].view(padded)[..., : shape[-1]]
    view = view.permute([places.index(place) for place in range(4)])
    view.copy_(tensor)
    return view


@dataclass
class Case:
    """One chunk's attention, with everything that the kernels are told."""

    rows: int = 1
    heads: int = 2
    kv_heads: int = 1
    queries: int = 65
    keys: int = 130
    size: int = 64
    value_size: int = 64
    scale: float | None = None
    options: dict = field(default_factory=dict)
    layout: dict = field(default_factory=dict)  # of everything that is read and written
    sink: float | None = None  # one more score of every query, whose value is zero

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value, and the output's gradient."""
        query = draw(self.rows, self.heads, self.queries, self.size, dtype=dtype, seed=1)
        key = draw(self.rows, self.kv_heads, self.keys, self.size, dtype=dtype, seed=2)
        value = draw(self.rows, self.kv_heads, self.keys, self.value_size, dtype=dtype, seed=3)
        gradient = draw(self.rows, self.heads, self.queries, self.value_size, dtype=dtype, seed=4)
        return query, key, value, gradient

    @property
    def all_options(self) -> dict:
        scale = self.size**-0.5 if self.scale is None else self.scale
        return {"scale": scale, **self.options}


@dataclass
class Results:
    output: Tensor
    lse: Tensor
    query_gradient: Tensor
    key_gradient: Tensor
    value_gradient: Tensor

    def equal(self, other: Results) -> bool:
        return all(torch.equal(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)


def visible(case: Case) -> Tensor:
    """[rows, 1, queries, keys], by the words of csrc/attention.h."""
    position = torch.arange(case.keys - case.queries, case.keys).view(1, 1, -1, 1)
    key = torch.arange(case.keys).view(1, 1, 1, -1)
    seen = (key <= position).expand(case.rows, 1, case.queries, case.keys)
    if window := case.options.get("window"):
        seen = seen & (key > position - window)
    if (first_key := case.options.get("first_key")) is not None:
        seen = seen & (key >= first_key[:, None, :, None])
    if (key_mask := case.options.get("key_mask")) is not None:
        seen = seen & key_mask[:, None, None, :]
    return seen


def expected(case: Case, dtype: torch.dtype) -> Results:
    """In float64, with torch's autograd; gradients of keys and values are added to ones."""
    *leaves, gradient = (tensor.double() for tensor in case.tensors(dtype))
    query, key, value = (leaf.requires_grad_() for leaf in leaves)
    group = case.heads // case.kv_heads
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * case.all_options["scale"]
    if softcap := case.options.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(case)
    scores = scores.masked_fill(~seen, -math.inf)
    if case.sink is not None:
        scores = torch.cat([scores, torch.full_like(scores[..., :1], case.sink)], -1)
        seen = torch.ones_like(scores, dtype=torch.bool)
    lse = torch.where(seen.any(-1), scores.logsumexp(-1), math.inf)
    weights = torch.exp(scores - lse[..., None])[..., : case.keys]
    output = weights @ value.repeat_interleave(group, 1)
    output.backward(gradient)
    return Results(output.detach(), lse.detach(), query.grad, key.grad + 1, value.grad + 1)


def run(cuda: EmulatedCuda, case: Case, dtype: torch.dtype, *, seed: int = 0) -> Results:
    """Forward and backward, into memory that held nothing but NaN."""
    cuda.seed(seed)
    layout, options = case.layout, case.all_options
    query, key, value, gradient = (laid_out(tensor, **layout) for tensor in case.tensors(dtype))
    output = laid_out(torch.full_like(gradient, math.nan), **layout)
    lse = torch.full(output.shape[:3], math.nan)
    cuda.forward(query, key, value, output, lse, **options)
    if case.sink is not None:
        merged = torch.logaddexp(lse, torch.tensor(case.sink))
        output *= torch.exp(lse - merged)[..., None]
        lse = merged
    query_gradient = laid_out(torch.full_like(query, math.nan), **layout)
    key_gradient = laid_out(torch.ones_like(key, dtype=torch.float32), **layout)
    value_gradient = laid_out(torch.ones_like(value, dtype=torch.float32), **layout)
    gradients = query_gradient, key_gradient, value_gradient
    cuda.backward(gradient, query, key, value, output, lse, *gradients, **options)
    for written in (output, *gradients):
        assert_margins_are_nan(written)
    return Results(output, lse, *gradients)


def assert_margins_are_nan(view: Tensor) -> None:
    """Nothing was written outside a view made by `laid_out`."""
    memory = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    outside = torch.ones(memory.shape, dtype=torch.bool)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    assert memory[outside].isnan().all()


def assert_close(got: Results, want: Results, dtype: torch.dtype) -> None:
    """Within some roundings to `dtype`, in the whole and entry by entry."""
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(got.lse.double(), want.lse, rtol=1e-6, atol=1e-5)
    for name in ("output", "query_gradient", "key_gradient", "value_gradient"):
        error, true = getattr(got, name).double() - getattr(want, name), getattr(want, name)
        if name in ("key_gradient", "value_gradient"):
            true = true - 1
        assert error.norm() <= 1.5 * rounding * true.norm() + 1e-6 * true.numel() ** 0.5, name
        assert error.abs().max() <= 8 * rounding * true.abs().max() + 1e-5, name


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("size", "value_size"), [(64, 64), (128, 128), (256, 256), (16, 16), (20, 33), (1, 1), (80, 96), (192, 128)]
)
def test_head_sizes(cuda: EmulatedCuda, dtype: torch.dtype, size: int, value_size: int) -> None:
    case = Case(size=size, value_size=value_size, queries=70, keys=100)
    assert_close(run(cuda, case, dtype), expected(case, dtype), dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 7), (7, 7), (1, 65), (65, 65), (64, 128), (129, 200), (3, 259), (80, 20)]
)
def test_lengths(cuda: EmulatedCuda, dtype: torch.dtype, queries: int, keys: int) -> None:
    case = Case(queries=queries, keys=keys, size=40, value_size=40)
    assert_close(run(cuda, case, dtype), expected(case, dtype), dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (6, 1)])
def test_heads_share_keys(cuda: EmulatedCuda, heads: int, kv_heads: int) -> None:
    case = Case(rows=2, heads=heads, kv_heads=kv_heads, queries=33, keys=70)
    assert_close(run(cuda, case, torch.bfloat16), expected(case, torch.bfloat16), torch.bfloat16)


def documents(*lengths: int, rows: int, queries: int) -> Tensor:
    """The first key of each query's own document, for rows of packed documents."""
    firsts = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    return firsts[-queries:].to(torch.int32).expand(rows, -1).contiguous()


def left_padding(*counts: int, keys: int) -> Tensor:
    return torch.arange(keys) >= torch.tensor(counts)[:, None]


OPTIONS = {
    "window": {"window": 17},
    "window of one": {"window": 1},
    "window beyond all keys": {"window": 2**40},
    "softcap": {"softcap": 1.5},
    "documents": {"first_key": documents(20, 75, 35, rows=2, queries=65)},
    "any first key": {"first_key": torch.randint(-5, 140, (2, 65), generator=torch.Generator().manual_seed(0)).int()},
    "left padding": {"key_mask": left_padding(0, 97, keys=130)},
    "any key mask": {"key_mask": torch.rand(2, 130, generator=torch.Generator().manual_seed(0)) < 0.5},
    "no key": {"key_mask": torch.zeros(2, 130, dtype=torch.bool)},
    "all at once": {
        "window": 50,
        "softcap": 3.0,
        "first_key": documents(20, 75, 35, rows=2, queries=65),
        "key_mask": left_padding(3, 97, keys=130),
    },
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(cuda: EmulatedCuda, dtype: torch.dtype, options: dict) -> None:
    case = Case(rows=2, options=options)
    got = run(cuda, case, dtype)
    assert_close(got, expected(case, dtype), dtype)
    blind = ~visible(case).any(-1).expand(got.lse.shape)
    assert (got.lse[blind] == math.inf).all()
    assert not got.output[blind].any()
    assert not got.query_gradient[blind].any()


# Of the tiles of large heads, one query or key, the first or the last, sees or is seen by its neighbour's.
AT_THE_EDGE = {
    "window": {"window": 35},
    "documents": {"first_key": documents(98, 32, rows=2, queries=65)},
    "left padding": {"key_mask": left_padding(63, 64, keys=130)},
}


@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("options", [OPTIONS["all at once"], *AT_THE_EDGE.values()], ids=["all at once", *AT_THE_EDGE])
def test_options_of_large_heads(cuda: EmulatedCuda, size: int, options: dict) -> None:
    case = Case(rows=2, heads=2, size=size, value_size=size, options=options)
    assert_close(run(cuda, case, torch.bfloat16), expected(case, torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.5])
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5, "window": 9}], ids=str)
def test_any_scale(cuda: EmulatedCuda, scale: float, options: dict) -> None:
    case = Case(scale=scale, options=options, queries=20, keys=40)
    assert_close(run(cuda, case, torch.float16), expected(case, torch.float16), torch.float16)


def test_more_terms_in_the_log_sum_exp(cuda: EmulatedCuda) -> None:
    case = Case(sink=0.8)
    assert_close(run(cuda, case, torch.bfloat16), expected(case, torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize(
    "layout",
    [
        {"order": "rths"},
        {"order": "trhs", "gap": 8},
        {"order": "rths", "gap": 24, "offset": 8},
        {"gap": 3},
        {"offset": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [48, 20])
def test_layouts(cuda: EmulatedCuda, layout: dict, size: int) -> None:
    """Vectors or single entries, whatever is around them: the same numbers to the last bit."""
    case = Case(rows=2, heads=4, kv_heads=2, queries=20, keys=40, size=size, value_size=size)
    contiguous = run(cuda, case, torch.bfloat16)
    assert_close(contiguous, expected(case, torch.bfloat16), torch.bfloat16)
    case.layout = layout
    assert run(cuda, case, torch.bfloat16).equal(contiguous)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_the_order_of_threads_does_not_matter(cuda: EmulatedCuda, size: int) -> None:
    case = Case(rows=2, size=size, value_size=size, queries=40, keys=90)
    case.options = {"first_key": documents(30, 40, 20, rows=2, queries=40), "key_mask": left_padding(3, 35, keys=90)}
    first, *others = (run(cuda, case, torch.bfloat16, seed=seed) for seed in range(4))
    assert all(other.equal(first) for other in others)


@pytest.mark.parametrize(
    "change",
    [{"size": 257}, {"value_size": 300}, {"heads": 3, "kv_heads": 2}],
    ids=str,
)
def test_what_the_kernels_cannot_do_is_refused(cuda: EmulatedCuda, change: dict) -> None:
    with pytest.raises(RuntimeError, match="cudaError 1:"):
        run(cuda, Case(**change), torch.bfloat16)


def test_float32_is_refused(cuda: EmulatedCuda) -> None:
    with pytest.raises(RuntimeError, match="cudaError 1:"):
        run(cuda, Case(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [48, 3])
@pytest.mark.parametrize("layout", [{}, {"order": "trhs", "gap": 5}, {"offset": 1}], ids=str)
def test_append(cuda: EmulatedCuda, dtype: torch.dtype, size: int, layout: dict) -> None:
    chunk = laid_out((100 * draw(2, 3, 700, size)).to(dtype), **layout, margin=0)
    buffer = laid_out(torch.full((2, 3, 800, size), 5, dtype=dtype), **layout, margin=7)
    cuda.append(buffer, chunk, 40)
    assert torch.equal(buffer[:, :, 40:740], chunk)
    assert (buffer[:, :, :40] == 5).all()
    assert (buffer[:, :, 740:] == 5).all()
    memory = torch.empty(0, dtype=dtype).set_(buffer.untyped_storage())
    assert (memory == 7).sum() == memory.numel() - buffer.numel() + (chunk == 7).sum()


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("size", [48, 3])
@pytest.mark.parametrize(
    "layout", [{}, {"order": "trhs", "gap": 4}, {"order": "rths", "gap": 1}, {"offset": 1}], ids=str
)
def test_accumulate(cuda: EmulatedCuda, dtype: torch.dtype, size: int, layout: dict) -> None:
    part = laid_out(draw(2, 3, 300, size, dtype=dtype), **layout)
    before = draw(2, 3, 300, size, seed=1)
    total = laid_out(before, **layout)
    cuda.accumulate(total, part)
    assert torch.equal(total, before + part.float())
    assert_margins_are_nan(total)


def test_nothing_to_do(cuda: EmulatedCuda) -> None:
    for case in (Case(queries=0), Case(rows=0)):
        got = run(cuda, case, torch.bfloat16)
        assert (got.key_gradient == 1).all()
    got = run(cuda, Case(keys=0, queries=3), torch.bfloat16)
    assert (got.lse == math.inf).all()
    assert not got.output.any()
    cuda.append(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 0, 8), 4)
    cuda.accumulate(torch.ones(1, 1, 0, 8), torch.ones(1, 1, 0, 8))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_sources_compile_for_gpus_without_spills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ARCHITECTURES_VARIABLE, raising=False)
    toolkit = cuda_compiler()
    jobs = compile_jobs(CSRC, installed_torch(), cpp_compiler(), toolkit, limited_api=True)
    sources = [job for job in jobs if job.source.suffix == ".cu"]
    assert [job.source for job in sources] == sorted((CSRC / "cuda").glob("*.cu"))
    kernels = 0
    for job in sources:
        said = run_compiler([*job.command, "-Xptxas=-v", str(job.source), "-o", str(tmp_path / "object.o")])
        assert "warning" not in said
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
        assert all(pair == ("0", "0") for pair in spills), said
        kernels += len(re.findall(r"Compiling entry function '\w*(?:forward|gradient|delta)_kernel", said))
    assert toolkit.architectures == ("80", "90", "100")
    assert kernels >= 2 * 3 * 3 * 3, "each of forward, dQ and dK/dV, for 2 dtypes, 3 sizes of heads and 3 architectures"
