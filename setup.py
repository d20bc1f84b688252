"""Build entry: pyproject.toml declares the package, this file adds the kernels, which csrc/building compiles.

Environment variables: LIGHTNING_SEQ1F1B_NATIVE=auto|on|off builds the kernels if possible (the default), or fails
without them, or leaves them out; LIGHTNING_SEQ1F1B_CUDA=auto|on|off says the same of the CUDA kernels, which need nvcc
but no GPU (auto: where nvcc is found and torch is a CUDA build).
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))

from building.compilation import build  # noqa: E402 (found only by the path above)
from building.problem import BuildProblemError  # noqa: E402 (likewise)

# Python without a global lock has no limited API yet.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")
REASON_FILE = "_native_build.json"  # what the installed package reads when the kernels are missing


def switch(variable: str) -> str:
    """What an environment variable says: "auto" (also when it is not set), "on" or "off"."""
    value = os.environ.get(variable, "").strip().lower() or "auto"
    if value not in ("auto", "on", "off"):
        raise CompileError(f"the environment variable {variable} must be auto, on or off, but is {value!r}")
    return value


class BuildKernels(build_ext):
    """Compiles the kernels, or leaves the reason why not."""

    def build_extension(self, ext: Extension) -> None:
        """Build one extension; a failure is an error only where the kernels, or those for CUDA, were asked for."""
        native, cuda = switch("LIGHTNING_SEQ1F1B_NATIVE"), switch("LIGHTNING_SEQ1F1B_CUDA")
        target = Path(self.get_ext_fullpath(ext.name))
        reason = target.with_name(REASON_FILE)
        for earlier in (target, reason):
            earlier.unlink(missing_ok=True)
        try:
            if native == "off":
                raise BuildProblemError("LIGHTNING_SEQ1F1B_NATIVE was off when the package was built")
            objects = ROOT / "build" / "kernels"
            print(build(ROOT / "csrc", target, objects, cuda=cuda, limited_api=LIMITED_API))
        except BuildProblemError as problem:
            if problem.details:
                print(problem.details, file=sys.stderr)
            if native == "on" or cuda == "on":
                raise CompileError(f"the kernels of lightning-seq1f1b cannot be built: {problem}") from problem
            print(f"installing without the kernels of lightning-seq1f1b: {problem}", file=sys.stderr)
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(json.dumps({"reason": str(problem), "details": problem.details}))

    def copy_extensions_to_source(self) -> None:
        """Leave in the source tree what was built now, and nothing of an earlier build."""
        package = Path(self.get_finalized_command("build_py").get_package_dir("lightning_seq1f1b"))
        for name in (Path(self.get_ext_filename("_native")).name, REASON_FILE):
            (package / name).unlink(missing_ok=True)
            built = Path(self.build_lib, "lightning_seq1f1b", name)
            if built.exists():
                self.copy_file(str(built), str(package / name))


class WheelWithOrWithoutKernels(bdist_wheel):
    """A wheel for this platform with the kernels, and for every platform without them."""

    def run(self) -> None:
        """Build the kernels first, because the name of the wheel depends on whether there are any."""
        self.run_command("build_ext")
        command = self.get_finalized_command("build_ext")
        if not all(Path(command.get_ext_fullpath(extension.name)).exists() for extension in command.extensions):
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


sources = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "csrc").rglob("*")) if path.is_file()]
setup(
    ext_modules=[
        Extension(
            "lightning_seq1f1b._native",
            sources=[path for path in sources if path.startswith("csrc/bindings/") and path.endswith(".cpp")],
            depends=[path for path in sources if not path.endswith(".pyc")],
            py_limited_api=LIMITED_API,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": WheelWithOrWithoutKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED_API else {},
)
