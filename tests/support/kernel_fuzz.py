"""The driver tests/csrc/kernel_fuzz.cpp with the CPU kernels, compiled by the commands that the package is built by."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
DRIVER = ROOT / "tests" / "csrc"
PROCESSES = 2

sys.path.append(str(CSRC))

from building.installed_torch import installed_torch  # noqa: E402 (found only by the path above)
from building.jobs import INSTRUCTION_SETS, Job, compile_jobs  # noqa: E402 (likewise)
from building.toolchain import cpp_compiler, run  # noqa: E402 (likewise)


@dataclass(frozen=True)
class Run:
    """How the driver ended: its exit status, negative for a signal, and what it printed."""

    status: int
    output: str


class Driver:
    """The compiled driver, and the objects that it is linked from, by the names of their sources.

    Args:
        folder: where to build it.
        objects: objects to take as they are; everything else is compiled.
        sources: the kernels' folder, `csrc` or a copy.

    Raises:
        BuildProblemError: It does not compile.
    """

    def __init__(self, folder: Path, objects: dict[str, Path] | None = None, sources: Path = CSRC) -> None:
        self.program = folder / "kernel_fuzz"
        self.objects = dict(objects or {})
        jobs = kernel_jobs(sources)
        plain = next(job.command for job in jobs if job.source.stem == "dispatch")
        drivers = [DRIVER / "kernel_fuzz.cpp", DRIVER / "amx_emulation.cpp"]
        # The order is that in which to link: what must run on every machine comes first.
        jobs = [*(Job(path, (*plain, f"-I{sources}")) for path in drivers), *jobs]
        self._compile(folder, (job for job in jobs if job.source.stem not in self.objects))
        linked = [str(self.objects[job.source.stem]) for job in jobs]
        run([*cpp_compiler().command, "-pthread", "-Wl,--wrap=syscall", *linked, "-o", str(self.program)])

    def _compile(self, folder: Path, jobs: Iterable[Job]) -> None:
        def compile_one(job: Job) -> tuple[str, Path]:
            made = folder / f"{job.source.stem}.o"
            run([*job.command, str(job.source), "-o", str(made)])
            return job.source.stem, made

        with ThreadPoolExecutor(PROCESSES) as pool:
            self.objects.update(pool.map(compile_one, jobs))

    def run(self, cases: int, seed: int) -> Run:
        """Test that many random cases."""
        command = [str(self.program), str(cases), str(seed)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280)
        return Run(done.returncode, done.stdout)


def kernel_jobs(sources: Path) -> list[Job]:
    """The commands that compile the CPU kernels."""
    jobs = compile_jobs(sources, installed_torch(), cpp_compiler(), None, limited_api=True)
    return [job for job in jobs if job.source.parent == sources / "cpu"]


def compiler_knows(instruction_set: str) -> bool:
    """Whether the kernels for an instruction set ("avx2", "avx512", "amx") are more than an empty file."""
    return cpp_compiler().accepts(INSTRUCTION_SETS[instruction_set])
