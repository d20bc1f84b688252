"""The imitation of a GPU that runs the CUDA sources in the tests: right kernels come out right, wrong ones do not."""

from __future__ import annotations

import ctypes
import math
import re

import pytest
import torch
from support.emulated_cuda import build


class Checks:
    """What cuda_emulation_checks.cpp offers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.seq1f1b_emulation_error.restype = ctypes.c_char_p

    def run(self, name: str, seed: int) -> str | None:
        """The error, "wrong numbers", or None when all was well."""
        numbers, out = torch.arange(128.0), torch.full((128,), math.nan)
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (out, numbers))
        status = self.library.seq1f1b_emulation_check(name.encode(), ctypes.c_uint64(seed), *pointers)
        assert status != -1, f"no kernel is called {name!r}"
        if status:
            return self.library.seq1f1b_emulation_error().decode()
        return None if torch.equal(out, numbers) else "wrong numbers"


@pytest.fixture(scope="session", params=[(), ("-DSEQ1F1B_EMULATION_UCONTEXT",)], ids=["own switch", "ucontext"])
def checks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checks:
    folder = tmp_path_factory.mktemp("checks")
    return Checks(build(folder, "cuda_emulation_checks.cpp", flags=request.param, kernels=False))


@pytest.mark.parametrize(
    "name",
    ["through shared memory", "through a warp", "overwritten after a barrier", "copied", "copied in groups"],
)
def test_the_emulation_runs_right_kernels(checks: Checks, name: str) -> None:
    assert [checks.run(name, seed) for seed in range(20)] == [None] * 20


@pytest.mark.parametrize(
    "name",
    [
        "no barrier",
        "no warp barrier",
        "overwritten too early",
        "copied without waiting",
        "copied without a barrier",
        "copied in groups, one pending",
    ],
)
def test_the_emulation_gives_wrong_numbers_for_a_race(checks: Checks, name: str) -> None:
    assert "wrong numbers" in [checks.run(name, seed) for seed in range(20)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too many barriers", r"deadlock: of 128 threads 32 wait at cuda_emulation_checks.cpp:\d+, 96 have ended"),
        ("different barriers", r"different places at once: threads of one block wait at .*:\d+ and at .*:\d+"),
        ("barrier without a lane", r"deadlock: of 128 threads 31 wait at|deadlock: of 128 threads 124 wait at"),
        ("write outside", "a write outside the block's 512 bytes of shared memory"),
        ("matrix outside", r"ldmatrix at byte \d+ of the block's 512 bytes of shared memory"),
        ("unaligned copy", "4 bytes off a multiple of 16"),
    ],
)
def test_the_emulation_reports_misuse(checks: Checks, name: str, message: str) -> None:
    assert re.search(message, checks.run(name, 0) or "nothing was reported")
    assert checks.run("copied", 0) is None, "the launch after a failure starts afresh"


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_the_emulation_rounds_as_torch_does(checks: Checks, dtype: torch.dtype, name: str) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    of_all_sizes = torch.randn(20000) * 2 ** torch.linspace(-42, 18, 20000)
    around_the_largest = 65504 + torch.arange(0.0, 40)
    numbers = torch.cat([every[~every.isnan()], of_all_sizes, around_the_largest])
    rounded, back = torch.empty(len(numbers), dtype=dtype), torch.empty(len(numbers))
    getattr(checks.library, f"seq1f1b_emulation_round_{name}")(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (numbers, rounded, back)), ctypes.c_int64(len(numbers))
    )
    assert torch.equal(rounded.view(torch.int16), numbers.to(dtype).view(torch.int16))
    assert torch.equal(back, numbers.to(dtype).float())
