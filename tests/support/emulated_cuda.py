"""The CUDA sources compiled for the CPU, and called through ctypes as the bindings would call them on a GPU."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

CSRC = Path(__file__).parents[2] / "csrc"
DRIVERS = Path(__file__).parents[1] / "csrc"
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def compiler() -> str:
    """The system's C++ compiler, or an error that says how to name one."""
    found = next(
        (path for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and (path := shutil.which(name))),
        None,
    )
    if found is None:
        raise RuntimeError(
            "No C++ compiler was found (looked for $CXX, c++, g++, clang++). These tests compile the CUDA sources for "
            "the CPU: install one (on Debian, `apt-get install g++`) or set CXX."
        )
    return found


def build_for_all(factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The emulation with all kernels, compiled once for all tests of the run, in whatever worker of xdist."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "emulated_cuda"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        library = folder / "cuda_emulation.cpp.so"
        return ctypes.CDLL(str(library)) if library.exists() else build(folder, "cuda_emulation.cpp")


def build(folder: Path, driver: str, *, flags: tuple[str, ...] = (), kernels: bool = True) -> ctypes.CDLL:
    """Compiles `driver` of tests/csrc with the emulation (and all kernels) into a shared library and loads it."""
    sources = [DRIVERS / driver, *sorted((CSRC / "cuda" / "emulation").glob("*.cpp"))]
    if kernels:
        sources += sorted((CSRC / "cuda").glob("*.cu"))
    library = folder / f"{driver}.so"
    command = [compiler(), "-std=c++17", "-O2", "-fPIC", "-shared", "-Wno-unknown-pragmas", *flags]
    command += ["-o", str(library), "-x", "c++", *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return ctypes.CDLL(str(library))


class Strided(ctypes.Structure):
    """`seq1f1b::Strided` of attention.h."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "token"))]

    @classmethod
    def of(cls, tensor: Tensor) -> Strided:
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
            raise ValueError("the last stride must be 1")
        return cls(tensor.data_ptr(), *tensor.stride()[:3])


COUNTS = ("rows", "heads", "kv_heads", "queries", "keys", "size", "value_size")


class Problem(ctypes.Structure):
    _fields_ = [
        ("dtype", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in COUNTS),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("window", ctypes.c_int64),
        ("first_key", ctypes.c_void_p),
        ("key_mask", ctypes.c_void_p),
    ]


class Forward(Problem):
    _fields_ = [*((name, Strided) for name in ("query", "key", "value", "output")), ("lse", ctypes.c_void_p)]


class Backward(Problem):
    _fields_ = [
        *((name, Strided) for name in ("gradient", "query", "key", "value", "output")),
        ("lse", ctypes.c_void_p),
        *((name, Strided) for name in ("query_gradient", "key_gradient", "value_gradient")),
    ]


class EmulatedCuda:
    """The functions of csrc/cuda/launch.h on CPU tensors. What a kernel does wrong is a RuntimeError."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.seq1f1b_emulation_error.restype = ctypes.c_char_p

    def seed(self, value: int) -> None:
        """Draws the order of blocks, warps and lanes anew."""
        self.library.seq1f1b_emulation_seed(ctypes.c_uint64(value))

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"cudaError {status}: {self.library.seq1f1b_emulation_error().decode()}")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, **options) -> None:
        """Fills `output` and `lse`."""
        problem = Forward(*_sizes(query, key, value, **options))
        problem.query, problem.key, problem.value = Strided.of(query), Strided.of(key), Strided.of(value)
        problem.output, problem.lse = Strided.of(output), lse.data_ptr()
        self.check(self.library.seq1f1b_cuda_forward(ctypes.byref(problem), None))

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        query_gradient: Tensor,
        key_gradient: Tensor,
        value_gradient: Tensor,
        **options,
    ) -> None:
        """Fills `query_gradient`, adds to `key_gradient` and `value_gradient`."""
        problem = Backward(*_sizes(query, key, value, **options))
        tensors = {name: tensor for name, tensor in locals().items() if isinstance(tensor, Tensor) and name != "lse"}
        for name, tensor in tensors.items():
            setattr(problem, name, Strided.of(tensor))
        problem.lse = lse.data_ptr()
        delta = torch.full(query.shape[:3], float("nan"))
        self.check(self.library.seq1f1b_cuda_backward(ctypes.byref(problem), ctypes.c_void_p(delta.data_ptr()), None))

    def append(self, buffer: Tensor, chunk: Tensor, start: int) -> None:
        """Copies `chunk` to the tokens of `buffer` from `start` on."""
        numbers = (*chunk.shape, chunk.element_size(), start)
        self.check(
            self.library.seq1f1b_cuda_append(Strided.of(buffer), Strided.of(chunk), *map(ctypes.c_int64, numbers), None)
        )

    def accumulate(self, total: Tensor, part: Tensor) -> None:
        """Adds `part` to `total`."""
        dtype = ctypes.c_int32(DTYPES[part.dtype])
        self.check(
            self.library.seq1f1b_cuda_accumulate(
                Strided.of(total), Strided.of(part), dtype, *map(ctypes.c_int64, part.shape), None
            )
        )


def _sizes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    first_key: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> tuple:
    rows, heads, queries, size = query.shape
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (first_key, key_mask)]
    counts = (rows, heads, key.shape[1], queries, key.shape[2], size, value.shape[3])
    return (DTYPES[query.dtype], *counts, scale, softcap, window, *pointers)
