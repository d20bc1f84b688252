"""`lightning-seq1f1b doctor`: what is installed and built, what this machine has, and which kernel will be used."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import lightning_seq1f1b
from lightning_seq1f1b import __version__
from lightning_seq1f1b.ops import flash, kernels, native

LIBRARIES = ("torch", "lightning", "transformers")
DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments after its name; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="lightning-seq1f1b doctor",
        description="Say what is installed, what was built, what this machine has, and which attention kernel is used.",
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    arguments = parser.parse_args(argv)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        findings = examine()
    # That the kernels are missing is among the findings; an ignored setting is not.
    built = findings["extension"]["available"]
    findings["warnings"] = [str(warning.message) for warning in said] if built else []
    print(json.dumps(findings, indent=2) if arguments.json else "\n".join(_lines(findings)))
    return 0


def examine() -> dict[str, Any]:
    """All findings, as what JSON can hold."""
    built = native.reason() is None
    return {
        "folder": str(Path(lightning_seq1f1b.__file__).parent),
        "versions": {
            "lightning-seq1f1b": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in LIBRARIES},
        },
        "extension": {
            "available": built,
            "reason": native.reason(),
            "details": native.build_details(),
            "build": asdict(native.build_info()) if built else None,
        },
        "cpu": {"threads": torch.get_num_threads(), "variants": list(native.cpu_variants())},
        "cuda": {"torch": torch.version.cuda, "devices": list(_devices())},
        "flash_attn": {
            "2": (_version("flash-attn") or "installed") if flash.flash_attn_2() else None,
            "3": (_version("flash-attn-3") or "installed") if flash.flash_attn_3() else None,
        },
        "kernels": list(_choices()),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[dict[str, str]]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        yield {"name": torch.cuda.get_device_name(index), "capability": f"{major}.{minor}"}


def _choices() -> Iterator[dict[str, Any]]:
    for device_type, dtypes in DTYPES.items():
        if device_type == "cuda" and not torch.cuda.is_available():
            continue
        for dtype in dtypes:
            candidates = kernels.explain(torch.device(device_type), dtype)
            chosen = next((name for name, lacks in candidates if lacks is None), kernels.PLAIN.name)
            own = chosen == kernels.NATIVE.name
            yield {
                "device": device_type,
                "dtype": str(dtype).removeprefix("torch."),
                "kernel": chosen,
                "variant": native.cpu_variant(dtype) if own and device_type == "cpu" else None,
                "passed_over": {name: lacks for name, lacks in candidates if lacks is not None},
            }


def _lines(findings: dict[str, Any]) -> Iterator[str]:
    yield from (
        f"package in {findings['folder']}",
        "versions",
        *(f"  {name} {version or 'not installed'}" for name, version in findings["versions"].items()),
    )
    yield from _extension_lines(findings["extension"])
    variants = ", ".join(findings["cpu"]["variants"]) or "none built"
    yield from ("cpu", f"  threads of torch: {findings['cpu']['threads']}", f"  kernels that run here: {variants}")
    cuda = findings["cuda"]
    yield from (
        "cuda",
        f"  torch is built for CUDA {cuda['torch']}" if cuda["torch"] else "  torch is built without CUDA",
    )
    for number, device in enumerate(cuda["devices"]):
        yield f"  device {number}: {device['name']}, compute capability {device['capability']}"
    if cuda["torch"] and not cuda["devices"]:
        yield "  no device is visible"
    yield "flash-attn"
    yield from (f"  {number}: {version or 'not installed'}" for number, version in findings["flash_attn"].items())
    yield "attention, heads of 64 entries"
    for choice in findings["kernels"]:
        variant = f", {choice['variant']}" if choice["variant"] else ""
        yield f"  {choice['device']} {choice['dtype']}: {choice['kernel']}{variant}"
        yield from (f"    not {name}: {lacks}" for name, lacks in choice["passed_over"].items())
    yield from (f"warning: {warning}" for warning in findings["warnings"])


def _extension_lines(extension: dict[str, Any]) -> Iterator[str]:
    yield "native kernels"
    build = extension["build"]
    if build is None:
        yield f"  not used: {extension['reason']}"
        yield from (f"    {line}" for line in (extension["details"] or "").splitlines())
        return
    cuda = build["cuda"]
    yield f"  built by {build['compiler']} against torch {build['torch']}, for torch {build['torch_abi']} and later"
    yield f"  for the CPU: {', '.join(build['cpu_variants'])}"
    yield f"  for CUDA: {cuda['version']}, {', '.join(cuda['architectures'])}" if cuda else "  for CUDA: not built"
