"""Which sources there are, and the command that compiles each."""

from __future__ import annotations

import os
import shlex
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from building.installed_torch import OLDEST, InstalledTorch
from building.problem import BuildProblemError
from building.toolchain import CppCompiler, CudaCompiler

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *AVX2)
# By a word in the file's name. A compiler that does not know the instructions compiles the file without them: then
# the file offers no kernels.
INSTRUCTION_SETS = {
    "avx2": AVX2,
    "avx512": AVX512,
    "amx": (*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}


@dataclass(frozen=True)
class Job:
    """One source and the command that compiles it, but for the names of the files."""

    source: Path
    command: tuple[str, ...]


def compile_jobs(
    sources: Path, torch: InstalledTorch, compiler: CppCompiler, cuda: CudaCompiler | None, limited_api: bool
) -> list[Job]:
    """What there is to compile, in the order in which to link it.

    An inline function that several files compile is taken from the first of them that is linked, so the files for
    newer instruction sets come after all that must run on every machine.

    Raises:
        BuildProblemError: Python's headers are missing.
    """
    common = ["-c", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-DNDEBUG"]
    # Names of files get into the messages of failed checks; where they lay on this machine is nobody's business.
    ours, theirs = (f"-ffile-prefix-map={sources.parent}/=",), (f"-ffile-prefix-map={torch.folder}=torch",)
    extra = [*compiler.accepted(ours), *shlex.split(os.environ.get("CXXFLAGS", ""))]
    kernels = sorted((sources / "cpu").glob("*.cpp"), key=lambda path: (_instruction_set(path), path.name))
    standard = compiler.accepted(["-std=c++20"], ["-std=c++2a"])
    bindings = [*standard, *_binding_flags(torch, cuda, limited_api), *compiler.accepted(theirs)]
    jobs = [
        Job(path, (*compiler.command, *common, *bindings, *extra))
        for path in sorted((sources / "bindings").glob("*.cpp"))
        if cuda or "cuda" not in _words(path)
    ]
    for path in kernels:
        instructions = compiler.accepted(INSTRUCTION_SETS.get(_instruction_set_name(path), ()))
        jobs.append(Job(path, (*compiler.command, *common, "-std=c++17", *instructions, *extra)))
    return [*jobs, *(_cuda_jobs(sources, cuda) if cuda else [])]


def _words(path: Path) -> set[str]:
    return set(path.stem.split("_"))


def _instruction_set_name(path: Path) -> str:
    return next((name for name in INSTRUCTION_SETS if name in _words(path)), "")


def _instruction_set(path: Path) -> int:
    return ["", *INSTRUCTION_SETS].index(_instruction_set_name(path))


def _binding_flags(torch: InstalledTorch, cuda: CudaCompiler | None, limited_api: bool) -> list[str]:
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise BuildProblemError(f"Python.h is not in {headers}; install the headers of this Python (python3-dev)")
    flags = [f"-DTORCH_TARGET_VERSION=0x{OLDEST[0]:02x}{OLDEST[1]:02x}000000000000ULL"]
    if limited_api:
        flags.append("-DPy_LIMITED_API=0x030A0000")
    if cuda:
        architectures = ", ".join(f'\\"{number}\\"' for number in cuda.architectures)
        flags += [
            "-DSEQ1F1B_CUDA",
            f'-DSEQ1F1B_CUDA_VERSION="{cuda.version}"',
            f'-DSEQ1F1B_CUDA_ARCHITECTURES="{architectures}"',
            f"-isystem{cuda.include}",
        ]
    return [*flags, f"-isystem{torch.folder / 'include'}", f"-isystem{headers}"]


def _cuda_jobs(sources: Path, cuda: CudaCompiler) -> list[Job]:
    flags = ("-c", "-O3", "-std=c++17", "-DNDEBUG", "-Xcompiler=-fPIC,-fvisibility=hidden", *cuda.target_flags())
    return [Job(path, (cuda.nvcc, *flags)) for path in sorted((sources / "cuda").glob("*.cu"))]
