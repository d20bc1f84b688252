"""The bindings of the CUDA kernels, run on the CPU: registered for it, and over the emulated kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.emulated_cuda import CSRC, DRIVERS, build_for_all, compiler

ROOT = Path(__file__).parents[2]
STAND_INS = DRIVERS / "cuda_bindings"
TORCH = Path(torch.__file__).parent


@pytest.fixture(scope="module")
def bindings(tmp_path_factory) -> Path:
    """The library that registers the CUDA bindings, but for the CPU."""
    folder = tmp_path_factory.mktemp("cuda_bindings")
    kernels = Path(build_for_all(tmp_path_factory)._name)
    copy = shutil.copytree(CSRC, folder / "csrc") / "bindings" / "cuda_ops.cpp"
    source = copy.read_text()
    assert source.count("(lightning_seq1f1b, CUDA, library)") == 1
    copy.write_text(source.replace("(lightning_seq1f1b, CUDA, library)", "(lightning_seq1f1b, CPU, library)"))
    library = folder / "bindings.so"
    command = [compiler(), "-std=c++20", "-O1", "-fPIC", "-shared", "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"]
    command += [f"-I{STAND_INS}", "-isystem", str(TORCH / "include"), str(copy), str(STAND_INS / "stream.cpp")]
    command += [
        str(kernels),
        f"-Wl,-rpath,{kernels.parent}",
        f"-L{TORCH / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


@pytest.mark.slow
def test_the_bindings_pass_to_the_kernels_what_the_ops_were_given(bindings):
    command = [sys.executable, str(STAND_INS / "compare.py"), str(bindings)]
    search = {**os.environ, "PYTHONPATH": str(ROOT), "LIGHTNING_SEQ1F1B_NATIVE": "off"}
    done = subprocess.run(command, env=search, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
