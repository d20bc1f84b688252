"""Finding the torch that the kernels are compiled against, without importing it."""

from __future__ import annotations

import importlib.util
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from building.problem import BuildProblemError

OLDEST = (2, 10)  # the first torch whose stable ABI has all that the bindings use
FOLDER_VARIABLE = "LIGHTNING_SEQ1F1B_TORCH"


@dataclass(frozen=True)
class InstalledTorch:
    """A torch package that is installed.

    Attributes:
        folder: The package's folder, with `include` and `lib`.
        version: Its version, such as "2.13.0+cpu".
        cuda: The CUDA version that it was built for; None for a build without CUDA.
    """

    folder: Path
    version: str
    cuda: str | None


def installed_torch() -> InstalledTorch:
    """The torch of the environment that the package is being installed into.

    Raises:
        BuildProblemError: There is none, or it is too old, or it comes without headers.
    """
    folders = list(dict.fromkeys(_candidates()))
    folder = next((folder for folder in folders if (folder / "version.py").is_file()), None)
    if folder is None:
        raise BuildProblemError(
            "no torch was found, whose headers the kernels need; install torch before this package, or name torch's "
            f"folder in the environment variable {FOLDER_VARIABLE}",
            "\n".join(["looked for", *map(str, folders)]),
        )
    text = (folder / "version.py").read_text()
    version = _assigned("__version__", text) or "unknown"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if not numbers or (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise BuildProblemError(f"the kernels need torch >= {OLDEST[0]}.{OLDEST[1]}, but {folder} holds {version}")
    for needed in ("include/torch/csrc/stable/library.h", "lib/libtorch_cpu.so", "lib/libc10.so"):
        if not (folder / needed).is_file():
            raise BuildProblemError(f"torch {version} in {folder} comes without {needed}")
    return InstalledTorch(folder, version, _assigned("cuda", text))


def _candidates() -> Iterator[Path]:
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        yield Path(chosen)
        return
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield Path(folder)
    # pip builds in isolation: the environment's packages are kept from the import path, but this is its interpreter.
    paths = sysconfig.get_paths()
    folders = [paths["platlib"], paths["purelib"], *site.getsitepackages()]
    # Other front ends build with an interpreter of their own, while the environment, if active, is still on the path.
    packages = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    folders += [str(Path(programs).parent / packages) for programs in os.get_exec_path()]
    folders.append(site.getusersitepackages())
    for folder in folders:
        yield Path(folder, "torch")


def _assigned(name: str, text: str) -> str | None:
    found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE)
    return found[1] if found else None
