"""Building the package from a copy of its tree, as pip would: with the kernels, without, and where something fails."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HOOK = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""
# Stands in for a compiler: makes empty files, and has the version that is in the file beside it.
PRETENDED_COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec cat "$0.version"
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && : > "$2"
  shift
done
"""
NO_COMPILER = {"CXX": "/bin/false", "CC": "/bin/false"}
EXTENSION = "lightning_seq1f1b/_native.abi3.so"
REASON = "lightning_seq1f1b/_native_build.json"
# An editable installation of the package would otherwise fill in what the package under test lacks.
ALONE = "import sys\nsys.meta_path = [finder for finder in sys.meta_path if '__editable__' not in str(finder)]\n"
REPORT = """
import json, warnings
import torch
from lightning_seq1f1b.ops import native
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    available = native.available(), native.available()
print(json.dumps([available, native.reason(), native.cpu_variants(), [str(warning.message) for warning in caught]]))
"""


def environment(**variables: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("LIGHTNING_SEQ1F1B_")}
    inherited = {name: value for name, value in ours.items() if name not in ("CXX", "CC", "CXXFLAGS", "LDFLAGS")}
    return {**inherited, "LIGHTNING_SEQ1F1B_CUDA": "off", **variables}


def run(tree: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment(**variables), capture_output=True, text=True, timeout=280
    )


def build(kind: str, tree: Path, out: Path, **variables: str) -> Path:
    """What a front end such as pip calls; returns the file that was made."""
    done = run(tree, "-c", HOOK, f"build_{kind}", str(out), **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


def fresh_tree(parent: Path) -> Path:
    tree = parent / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    generated = shutil.ignore_patterns("__pycache__", "*.so", Path(REASON).name)
    for name in ("lightning_seq1f1b", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=generated)
    return tree


@pytest.fixture
def tree(tmp_path):
    return fresh_tree(tmp_path)


@pytest.fixture
def pretended_compiler(tmp_path):
    compiler = tmp_path / "pretended"
    compiler.write_text(PRETENDED_COMPILER)
    compiler.chmod(0o755)
    Path(f"{compiler}.version").write_text("pretended 1.0.0\n")
    return compiler


@pytest.fixture(scope="module")
def built_tree(tmp_path_factory):
    return fresh_tree(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def wheel(built_tree):
    return build("wheel", built_tree, built_tree / "dist")


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def files(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as opened:
        return set(opened.namelist())


def symbols(library: Path, kind: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", kind, library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in listed.splitlines()}


def imported(folder: Path, **variables: str) -> str:
    """What a new process finds of the package in a folder."""
    done = run(folder, "-c", ALONE + REPORT, PYTHONPATH=str(folder), **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_serves_every_python_of_this_platform(wheel):
    assert wheel.name.endswith(f"-cp310-abi3-linux_{platform.machine()}.whl")
    assert wheel.stat().st_size < 3_000_000
    contents = files(wheel)
    assert EXTENSION in contents
    assert REASON not in contents
    assert {name.split("/")[0] for name in contents} == {
        "lightning_seq1f1b",
        f"{wheel.name.split('-cp310')[0]}.dist-info",
    }
    assert {Path(name).suffix for name in contents if name.startswith("lightning_seq1f1b/")} <= {".py", ".typed", ".so"}


@pytest.mark.slow
def test_the_extension_needs_only_what_is_stable(unpacked):
    stable = re.compile(
        r"(aoti_torch_|torch_|Py|_Py)\w+$|\S+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+$|_ITM_\w+$|__gmon_start__$"
    )
    needed = symbols(unpacked / EXTENSION, "--undefined-only")
    assert {name for name in needed if not stable.match(name)} == set()
    assert any(name.startswith("aoti_torch_") for name in needed)
    assert symbols(unpacked / EXTENSION, "--defined-only") == {"PyInit__native"}


@pytest.mark.slow
def test_the_extension_names_no_place_of_the_machine(unpacked, built_tree):
    contents = (unpacked / EXTENSION).read_bytes()
    for place in (built_tree, Path(torch.__file__).parent):
        assert str(place).encode() not in contents


@pytest.mark.slow
def test_the_extension_loads_and_computes(unpacked):
    assert imported(unpacked).startswith('[[true, true], null, ["generic"')
    code = (
        "import torch\nfrom lightning_seq1f1b.ops import library, native\nassert native.available()\n"
        "x = torch.randn(1, 2, 5, 8)\n"
        "ours = library.attend(x, x, x, 0.3, 0, 0.0, None, None)[0]\n"
        "theirs = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3)\n"
        "torch.testing.assert_close(ours, theirs)\n"
        "try:\n    library.attend(x, x[:, :, :4], x[:, :, :4], 0.3, 0, 0.0, None, None)\n"
        "except ValueError as error:\n    assert 'holds 4 for 5 queries' in str(error)\n"
        "else:\n    raise AssertionError\n"
    )
    done = run(unpacked, "-c", ALONE + code, PYTHONPATH=str(unpacked))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_second_build_compiles_only_what_changed(wheel, built_tree):
    def compiled() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (built_tree / "build" / "kernels").iterdir()}

    before = compiled()
    (built_tree / "csrc" / "bindings" / "module.cpp").touch()
    editable = build("editable", built_tree, built_tree / "dist")
    after = compiled()
    assert {name.split("-")[0] for name in after if before.get(name) != after[name]} == {"module"}
    assert "editable" in editable.name
    assert (built_tree / EXTENSION).is_file()
    assert not (built_tree / REASON).exists()


def compiled_in_place(tree: Path, compiler: Path) -> set[str]:
    """Builds where the tree is, and returns the names of all objects that there are then."""
    done = run(tree, "setup.py", "-q", "build_ext", "--inplace", CXX=str(compiler))
    assert done.returncode == 0, done.stderr
    assert (tree / EXTENSION).exists(), done.stderr
    return {path.name for path in (tree / "build" / "kernels").iterdir()}


def test_another_version_of_the_compiler_compiles_everything_again(tree, pretended_compiler):
    objects = compiled_in_place(tree, pretended_compiler)
    sources = {path.stem for folder in ("bindings", "cpu") for path in (tree / "csrc" / folder).glob("*.cpp")}
    assert sorted(name.split("-")[0] for name in objects) == sorted(sources - {"cuda_ops"})
    assert compiled_in_place(tree, pretended_compiler) == objects
    Path(f"{pretended_compiler}.version").write_text("pretended 1.0.1\n")
    assert len(compiled_in_place(tree, pretended_compiler) - objects) == len(objects)


def test_a_number_of_processes_that_is_none_is_said(tree, pretended_compiler):
    done = run(tree, "setup.py", "-q", "build_ext", "--inplace", CXX=str(pretended_compiler), MAX_JOBS="two")
    assert done.returncode == 0, done.stderr
    assert "MAX_JOBS must be a whole number, but is 'two'" in (tree / REASON).read_text()
    assert "" not in done.stderr.splitlines(), "there was nothing that a compiler printed"


def test_a_folder_that_cannot_be_written_to_is_said(tree, pretended_compiler):
    (tree / "build").mkdir()
    (tree / "build" / "kernels").write_text("no folder")
    done = run(tree, "setup.py", "-q", "build_ext", "--inplace", CXX=str(pretended_compiler))
    assert done.returncode == 0, done.stderr
    assert re.search(r"File exists: .*build/kernels.* must be folders", (tree / REASON).read_text())


def test_the_source_distribution_holds_the_kernels(tree, tmp_path):
    with tarfile.open(build("sdist", tree, tmp_path, **NO_COMPILER)) as archive:
        contents = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {path.relative_to(tree).as_posix() for path in (tree / "csrc").rglob("*") if path.is_file()}
    assert {name for name in wanted if not name.endswith(".pyc")} <= contents
    assert "setup.py" in contents


def test_without_a_compiler_the_package_is_installed_without_kernels(tree, tmp_path):
    pure = build("wheel", tree, tmp_path, **NO_COMPILER)
    assert pure.name.endswith("-py3-none-any.whl")
    contents = files(pure)
    assert EXTENSION not in contents
    assert REASON in contents
    assert "lightning_seq1f1b/ops/native.py" in contents
    with zipfile.ZipFile(pure) as archive:
        archive.extractall(tmp_path / "unpacked")
    found = imported(tmp_path / "unpacked")
    assert found.startswith("[[false, false]")
    assert found.count("runs without its native kernels") == 1
    assert "/bin/false does not compile an empty file" in found
    assert imported(tmp_path / "unpacked", LIGHTNING_SEQ1F1B_NATIVE="off").count("runs without") == 0


def test_a_failed_compilation_leaves_what_the_compiler_said(tree, tmp_path):
    (tree / "csrc" / "cpu" / "flash_amx.cpp").write_text("this is no C++\n")  # the first to be compiled
    pure = build("wheel", tree, tmp_path, MAX_JOBS="1")
    assert pure.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(pure) as archive:
        left = archive.read(REASON).decode()
    assert "flash_amx.cpp" in left
    assert "this is no C++" in left


@pytest.mark.parametrize("switch", ["LIGHTNING_SEQ1F1B_NATIVE", "LIGHTNING_SEQ1F1B_CUDA"])
def test_kernels_that_are_asked_for_are_built_or_it_fails(tree, tmp_path, switch):
    done = run(tree, "-c", HOOK, "build_wheel", str(tmp_path), **{**NO_COMPILER, switch: "on"})
    assert done.returncode != 0
    assert "/bin/false does not compile an empty file" in done.stderr
    assert list(tmp_path.glob("*.whl")) == []


def test_kernels_can_be_left_out(tree, tmp_path):
    pure = build("wheel", tree, tmp_path, LIGHTNING_SEQ1F1B_NATIVE="off")
    assert pure.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(pure) as archive:
        assert b"LIGHTNING_SEQ1F1B_NATIVE was off" in archive.read(REASON)


def test_a_build_in_place_leaves_nothing_of_an_earlier_one(tree):
    (tree / EXTENSION).write_bytes(b"of an earlier build")
    done = run(tree, "setup.py", "-q", "build_ext", "--inplace", **NO_COMPILER)
    assert done.returncode == 0, done.stderr
    assert not (tree / EXTENSION).exists()
    assert "/bin/false" in (tree / REASON).read_text()


@pytest.mark.parametrize("switch", ["LIGHTNING_SEQ1F1B_NATIVE", "LIGHTNING_SEQ1F1B_CUDA"])
def test_a_switch_knows_three_positions(tree, tmp_path, switch):
    done = run(tree, "-c", HOOK, "build_wheel", str(tmp_path), **{switch: "yes"})
    assert done.returncode != 0
    assert f"{switch} must be auto, on or off, but is 'yes'" in done.stderr


def test_cuda_needs_its_compiler(tree, tmp_path):
    compilers = tmp_path / "bin"
    compilers.mkdir()
    (compilers / "c++").symlink_to(shutil.which("c++") or shutil.which("g++"))
    variables = {"PATH": str(compilers), "CXX": "c++", "CUDA_HOME": str(tmp_path), "CUDA_PATH": ""}
    done = run(tree, "-c", HOOK, "build_wheel", str(tmp_path), **variables, LIGHTNING_SEQ1F1B_CUDA="on")
    assert done.returncode != 0
    assert "nvcc was found neither in CUDA_HOME nor on the path" in done.stderr


@pytest.mark.slow
def test_a_cuda_compiler_that_does_not_work_costs_only_the_cuda_kernels(wheel, built_tree, tmp_path):
    home, pretended = tmp_path / "cuda", tmp_path / "torch"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").symlink_to("/bin/false")
    pretended.mkdir()
    for name in ("include", "lib"):
        (pretended / name).symlink_to(Path(torch.__file__).parent / name)
    (pretended / "version.py").write_text(f"__version__ = '{torch.__version__}'\ncuda = '13.0'\n")
    variables = {"CUDA_HOME": str(home), "LIGHTNING_SEQ1F1B_TORCH": str(pretended), "LIGHTNING_SEQ1F1B_CUDA": "auto"}
    done = run(built_tree, "-c", HOOK, "build_wheel", str(tmp_path), **variables)
    assert done.returncode == 0, done.stderr
    assert "building the kernels without CUDA" in done.stderr
    assert EXTENSION in files(tmp_path / done.stdout.splitlines()[-1])


def test_torch_is_found_where_pip_hides_it(tree):
    """Under build isolation the environment's packages are not on the import path."""
    code = (
        "import sys\nsys.path = ['csrc', *(path for path in sys.path if 'site-packages' not in path)]\n"
        "from building.installed_torch import installed_torch\n"
        "found = installed_torch()\nassert 'torch' not in sys.modules\nprint(found.folder, found.version, found.cuda)"
    )
    done = run(tree, "-c", code, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(Path(torch.__file__).parent), torch.__version__, str(torch.version.cuda)]


def test_torch_is_found_by_the_environment_variable(tree, tmp_path):
    code = (
        "import sys\nsys.path.insert(0, 'csrc')\n"
        "from building.installed_torch import installed_torch\ninstalled_torch()"
    )
    done = run(tree, "-c", code, LIGHTNING_SEQ1F1B_TORCH=str(tmp_path))
    assert done.returncode != 0
    assert "no torch was found, whose headers the kernels need" in done.stderr
    (tmp_path / "version.py").write_text("__version__ = '2.9.1'\n")
    done = run(tree, "-c", code, LIGHTNING_SEQ1F1B_TORCH=str(tmp_path))
    assert f"the kernels need torch >= 2.10, but {tmp_path} holds 2.9.1" in done.stderr
