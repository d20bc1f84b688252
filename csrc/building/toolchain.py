"""The compilers: which there are, and what they accept."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from building.problem import BuildProblemError

ARCHITECTURES_VARIABLE = "LIGHTNING_SEQ1F1B_CUDA_ARCHS"
ARCHITECTURES = ("80", "90", "100")


def run(command: Sequence[str]) -> str:
    """Run a compiler and return what it printed.

    Raises:
        BuildProblemError: It failed; with all that it printed.
    """
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    except OSError as error:
        raise BuildProblemError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        lines = done.stdout.splitlines()
        complaint = next((line.strip() for line in lines if "error" in line.lower()), "it says nothing about an error")
        raise BuildProblemError(
            f"{command[0]} ended with status {done.returncode}: {complaint}", f"{shlex.join(command)}\n{done.stdout}"
        )
    return done.stdout


@dataclass(frozen=True)
class CppCompiler:
    """A C++ compiler, as the start of a command line."""

    command: tuple[str, ...]

    @property
    def banner(self) -> str:
        """What it says of itself, its exact version among it."""
        return run([*self.command, "--version"])

    def accepts(self, flags: Iterable[str]) -> bool:
        """Whether it compiles an empty file with these flags."""
        return _succeeds((*self.command, *flags, "-fsyntax-only", "-x", "c++", os.devnull))

    def accepted(self, *choices: Sequence[str]) -> tuple[str, ...]:
        """The first of several lists of flags that it accepts; none when it accepts none of them."""
        return next((tuple(flags) for flags in choices if self.accepts(flags)), ())


def cpp_compiler() -> CppCompiler:
    """The compiler named by CXX, else the one that Python was built with, else the system's.

    Raises:
        BuildProblemError: There is none, or it does not work.
    """
    chosen = os.environ.get("CXX")
    names = [chosen] if chosen else [sysconfig.get_config_var("CXX") or "", "c++", "g++", "clang++"]
    commands = [tuple(shlex.split(name)) for name in names]
    command = next((command for command in commands if command and shutil.which(command[0])), None)
    if command is None:
        raise BuildProblemError(
            f"no C++ compiler was found ({', '.join(filter(None, names))}); install one or name it in CXX"
        )
    compiler = CppCompiler(command)
    if not compiler.accepts([]):
        raise BuildProblemError(f"the C++ compiler {shlex.join(command)} does not compile an empty file")
    return compiler


@dataclass(frozen=True)
class CudaCompiler:
    """nvcc with the toolkit around it, and what to compile for."""

    nvcc: str
    version: str
    include: Path
    libraries: Path
    architectures: tuple[str, ...]

    @property
    def banner(self) -> str:
        """What it says of itself, its exact version among it."""
        return run([self.nvcc, "--version"])

    def target_flags(self) -> list[str]:
        """Machine code for each architecture, and PTX of the newest for what comes after it."""
        flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in self.architectures]
        newest = self.architectures[-1]
        return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def nvcc_path() -> str | None:
    """The nvcc of CUDA_HOME, else the one on the path."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    inside = home and shutil.which(str(Path(home, "bin", "nvcc")))
    return inside or shutil.which("nvcc")


def cuda_compiler() -> CudaCompiler:
    """The CUDA toolkit; neither a GPU nor a CUDA build of torch is needed to compile with it.

    Raises:
        BuildProblemError: There is none, or it cannot compile for what LIGHTNING_SEQ1F1B_CUDA_ARCHS names.
    """
    nvcc = nvcc_path()
    if nvcc is None:
        raise BuildProblemError("nvcc was found neither in CUDA_HOME nor on the path; install the CUDA toolkit")
    release = re.search(r"release (\d+\.\d+)", run([nvcc, "--version"]))
    root = re.search(r"^#\$ TOP=(.*)$", run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]), re.M)
    top = Path(root[1].strip()).resolve() if root else Path(nvcc).resolve().parents[1]
    folders = [top, *sorted(top.glob("targets/*-linux"))]
    headers = [path for folder in folders for path in folder.glob("include/cuda_runtime_api.h")]
    libraries = [path for folder in folders for path in folder.glob("lib*/libcudart_static.a")]
    if release is None or not headers or not libraries:
        raise BuildProblemError(f"the CUDA toolkit in {top} is incomplete: no libcudart_static.a or cuda_runtime_api.h")
    return CudaCompiler(nvcc, release[1], headers[0].parent, libraries[0].parent, _architectures(nvcc))


def _architectures(nvcc: str) -> tuple[str, ...]:
    known = set(re.findall(r"compute_(\w+)", run([nvcc, "--list-gpu-arch"])))
    chosen = re.findall(r"[^\s,;]+", os.environ.get(ARCHITECTURES_VARIABLE, ""))
    for number in chosen:
        if not re.fullmatch(r"\d+[af]?", number) or number.rstrip("af") not in known:
            raise BuildProblemError(
                f"{ARCHITECTURES_VARIABLE} holds {number!r}, which is none of the architectures that {nvcc} knows: "
                f"{', '.join(sorted(known, key=lambda name: (len(name), name)))}"
            )
        if int(number.rstrip("af")) < int(ARCHITECTURES[0]):
            raise BuildProblemError(
                f"{ARCHITECTURES_VARIABLE} holds {number!r}, but the kernels need {ARCHITECTURES[0]} or later"
            )
    numbers = chosen or [number for number in ARCHITECTURES if number in known]
    return tuple(sorted(set(numbers), key=lambda number: int(number.rstrip("af"))))


@functools.cache
def _succeeds(command: tuple[str, ...]) -> bool:
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False
