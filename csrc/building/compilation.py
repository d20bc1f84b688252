"""Compiling the kernels and the bindings into one shared object."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from building.installed_torch import InstalledTorch, installed_torch
from building.jobs import Job, compile_jobs
from building.problem import BuildProblemError
from building.toolchain import CppCompiler, CudaCompiler, cpp_compiler, cuda_compiler, nvcc_path, run

COMPILED_SUFFIXES = {".cpp", ".cu", ".py", ".pyc"}  # all else in the folder of sources is included by them


def build(sources: Path, target: Path, objects: Path, *, cuda: str, limited_api: bool) -> str:
    """Compile the kernels and the bindings into one shared object.

    Objects that are newer than their source and than all headers are taken as they are.

    Args:
        sources: The folder `csrc`.
        target: The shared object to make.
        objects: A folder for the objects, kept from one build to the next.
        cuda: "on", "off", or "auto": with CUDA where nvcc is found, works, and torch is a CUDA build.
        limited_api: Compile against Python's limited API, so that one file serves every Python from 3.10 on.

    Returns:
        One line that says what was built.

    Raises:
        BuildProblemError: It cannot be built here.
    """
    if not sys.platform.startswith("linux"):
        raise BuildProblemError(f"the kernels are built on Linux only, and this is {platform.system()}")
    torch = installed_torch()
    compiler = cpp_compiler()
    if cuda == "on":
        return _build(sources, target, objects, torch, compiler, cuda_compiler(), limited_api)
    if cuda == "auto" and torch.cuda is not None and nvcc_path() is not None:
        try:
            return _build(sources, target, objects, torch, compiler, cuda_compiler(), limited_api)
        except BuildProblemError as problem:
            if problem.details:
                print(problem.details, file=sys.stderr)
            print(f"building the kernels without CUDA: {problem}", file=sys.stderr)
    return _build(sources, target, objects, torch, compiler, None, limited_api)


def _build(
    sources: Path,
    target: Path,
    objects: Path,
    torch: InstalledTorch,
    compiler: CppCompiler,
    toolkit: CudaCompiler | None,
    limited_api: bool,
) -> str:
    jobs = compile_jobs(sources, torch, compiler, toolkit, limited_api)
    # nvcc leaves to the C++ compiler what runs on the host.
    compiled_by = {".cpp": compiler.banner, ".cu": compiler.banner + (toolkit.banner if toolkit else "")}
    # The C++ library comes first: torch's libraries export some of its functions too, but not in every version.
    libraries = ["-lstdc++", f"-L{torch.folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    if toolkit:
        # libtorch holds no code, but is what leads to the CUDA part of torch where there is one: only so is the current
        # stream found, which the bindings know by a weak name.
        libraries += ["-Wl,--push-state,--no-as-needed", "-ltorch", "-Wl,--pop-state"]
        libraries += [f"-L{toolkit.libraries}", "-lcudart_static", "-lrt", "-ldl"]
    try:
        compiled = _compile(jobs, sources, torch, compiled_by, objects)
        _link(compiler, compiled, libraries, sources / "bindings" / "exports.map", target)
    except OSError as error:
        raise BuildProblemError(
            f"a file of the build cannot be read or written: {error}; {objects} and {target.parent} must be folders "
            "that can be written to"
        ) from error
    kind = f"with CUDA {toolkit.version} for {', '.join(toolkit.architectures)}" if toolkit else "without CUDA"
    return f"built {target.name} with {shlex.join(compiler.command)} against torch {torch.version}, {kind}"


def _compile(
    jobs: Sequence[Job], sources: Path, torch: InstalledTorch, compiled_by: Mapping[str, str], objects: Path
) -> list[Path]:
    objects.mkdir(parents=True, exist_ok=True)
    headers = [path for path in sources.rglob("*") if path.is_file() and path.suffix not in COMPILED_SUFFIXES]
    newest_header = max((path.stat().st_mtime for path in headers), default=0.0)

    def compile_one(job: Job) -> Path:
        command = "\0".join((*job.command, str(job.source), torch.version, compiled_by[job.source.suffix]))
        made = objects / f"{job.source.stem}-{hashlib.sha256(command.encode()).hexdigest()[:12]}.o"
        if not made.exists() or made.stat().st_mtime <= max(newest_header, job.source.stat().st_mtime):
            with _replacing(made) as unfinished:
                run([*job.command, str(job.source), "-o", str(unfinished)])
        return made

    with ThreadPoolExecutor(_processes()) as pool:
        # The kernels are last and take longest: they start first.
        futures = {job: pool.submit(compile_one, job) for job in reversed(jobs)}
        try:
            for done in as_completed(futures.values()):
                done.result()  # the first failure ends it, whichever job it is of
            return [futures[job].result() for job in jobs]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _link(
    compiler: CppCompiler, objects: Sequence[Path], libraries: Sequence[str], exports: Path, target: Path
) -> None:
    flags = ["-shared", "-pthread", "-Wl,--strip-all", f"-Wl,--version-script={exports}"]
    extra = shlex.split(os.environ.get("LDFLAGS", ""))
    target.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(target) as unfinished:
        run([*compiler.command, *flags, *map(str, objects), *libraries, *extra, "-o", str(unfinished)])


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` once all is written, so that no build finds half a file."""
    unfinished = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _processes() -> int:
    wanted = os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0))
    try:
        return max(1, int(wanted))
    except ValueError:
        raise BuildProblemError(
            f"the environment variable MAX_JOBS must be a whole number, but is {wanted!r}"
        ) from None
