"""The extension with the native kernels: loaded when first needed, and done without where it was not built."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lightning_seq1f1b.ops.notice import say_once

MODULE = "lightning_seq1f1b._native"
SWITCH = "LIGHTNING_SEQ1F1B_NATIVE"
VARIANT = "LIGHTNING_SEQ1F1B_CPU"
_REASON_FILE = Path(__file__).parents[1] / "_native_build.json"  # what an installation without the extension leaves


@dataclass(frozen=True)
class CudaBuild:
    """The toolkit that the CUDA kernels were compiled by, and the architectures they were compiled for."""

    version: str
    architectures: tuple[str, ...]


@dataclass(frozen=True)
class BuildInfo:
    """How the extension was built.

    Attributes:
        compiler: name and version.
        torch: version of the torch whose headers it was compiled against.
        torch_abi: the oldest torch that it runs on.
        cpu_variants: instruction sets that its CPU kernels were compiled for.
        cuda: None when it was built without CUDA.
    """

    compiler: str
    torch: str
    torch_abi: str
    cpu_variants: tuple[str, ...]
    cuda: CudaBuild | None


@dataclass
class _Extension:
    """The outcome of loading it.

    Attributes:
        module: None when it is missing.
        reason: why it is missing; None when it is not.
        warning: what to warn of at the first use, until that has happened.
    """

    module: Any
    reason: str | None = None
    warning: str | None = None


_extension: _Extension | None = None


def load() -> None:
    """Load the native kernels, if they are there; says nothing."""
    _load_once()


def available() -> bool:
    """Whether the native kernels can be used; warns, the first time, where they are missing without being unwanted."""
    extension = _load_once()
    if extension.warning is not None:
        say_once(extension.warning)
        extension.warning = None
    return extension.module is not None


def reason() -> str | None:
    """Why the native kernels cannot be used; None where they can."""
    return _load_once().reason


def build_details() -> str | None:
    """What else there is to know of a failed build, such as what the compiler printed; None for nothing."""
    return _left_behind().get("details") or None


def cpu_variants() -> tuple[str, ...]:
    """Variants of the CPU kernels that run on this machine, slowest first; none without the extension."""
    module = _load_once().module
    return () if module is None else tuple(module.cpu_variants())


def cpu_variant(dtype: torch.dtype) -> str:
    """The variant of the CPU kernels that computes a dtype.

    Raises:
        ValueError: They do not compute this dtype.
        RuntimeError: The extension is missing.
    """
    variant: str = _module().cpu_variant(str(dtype).removeprefix("torch."))
    return variant


def use_cpu_variant(name: str) -> None:
    """Compute with one variant of the CPU kernels wherever it can, in the whole process.

    Args:
        name: one of `cpu_variants()`; "" goes back to the fastest.

    Raises:
        ValueError: There is no such variant here.
        RuntimeError: The extension is missing.
    """
    _module().use_cpu_variant(name)


def build_info() -> BuildInfo:
    """How the extension was built.

    Raises:
        RuntimeError: The extension is missing.
    """
    return _parsed(_module().build_info())


@cache
def _parsed(text: str) -> BuildInfo:
    # Once: the choice of a CUDA kernel asks for it in every call.
    found = json.loads(text)
    cuda = found["cuda"]
    return BuildInfo(
        compiler=found["compiler"],
        torch=found["torch"],
        torch_abi=found["torch_abi"],
        cpu_variants=tuple(found["cpu_variants"]),
        cuda=None if cuda is None else CudaBuild(cuda["version"], tuple(cuda["architectures"])),
    )


def _module() -> Any:
    extension = _load_once()
    if extension.module is None:
        raise RuntimeError(f"the native kernels are missing: {extension.reason}")
    return extension.module


def _load_once() -> _Extension:
    global _extension
    if _extension is None:
        _extension = _load()
    return _extension


def _load() -> _Extension:
    switch = os.environ.get(SWITCH, "").strip().lower()
    if switch not in ("", "auto", "on", "off"):
        raise ValueError(f"the environment variable {SWITCH} is auto, on or off, not {switch!r}")
    if switch == "off":
        return _Extension(None, f"switched off by {SWITCH}=off")
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == MODULE:
            reason = _left_behind().get("reason", "this copy of the package was never built")
        else:
            reason = f"the extension cannot be loaded by torch {torch.__version__}: {error}"
        return _Extension(None, reason, _missing(reason))
    return _Extension(module, warning=_choose_variant(module))


def _choose_variant(module: Any) -> str | None:
    name = os.environ.get(VARIANT, "")
    try:
        module.use_cpu_variant(name)
    except ValueError as error:
        return f"the environment variable {VARIANT} is ignored: {error}"
    return None


def _missing(reason: str) -> str:
    return (
        f"lightning-seq1f1b runs without its native kernels, by slower steps of torch: {reason}. Where torch and a C++ "
        f"compiler are installed, they are built by installing it again with pip's --force-reinstall --no-deps "
        f"--no-cache-dir; `lightning-seq1f1b doctor` tells more, and {SWITCH}=off silences this warning."
    )


def _left_behind() -> dict[str, str]:
    try:
        content: dict[str, str] = json.loads(_REASON_FILE.read_text())
    except (OSError, ValueError):  # absent, or not what an installation writes
        return {}
    return content
