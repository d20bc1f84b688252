"""The command that says what was built and which kernel is used, with and without the extension."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightning_seq1f1b
from lightning_seq1f1b.cli import doctor
from lightning_seq1f1b.cli.main import main
from lightning_seq1f1b.ops import kernels, native, notice

ROOT = Path(__file__).parents[2]
CPU_DTYPES = ["float32", "float64", "bfloat16", "float16"]


class Extension:
    """Stands in for the compiled module."""

    def cpu_variants(self) -> list[str]:
        return ["generic", "avx2", "amx"]

    def cpu_variant(self, dtype: str) -> str:
        return "amx" if dtype == "bfloat16" else "avx2"

    def build_info(self) -> str:
        info = {"compiler": "GCC 12.2.0", "torch": "2.13.0", "torch_abi": "2.10"}
        return json.dumps({**info, "cpu_variants": ["generic", "avx2", "avx512", "amx"], "cuda": None})


@pytest.fixture
def missing(monkeypatch, tmp_path):
    reason = tmp_path / "reason.json"
    reason.write_text(json.dumps({"reason": "c++ ended with status 1", "details": "c++ -c file.cpp\nfile.cpp: error"}))
    monkeypatch.setattr(native, "_REASON_FILE", reason)
    monkeypatch.setattr(native, "_extension", native._Extension(None, "c++ ended with status 1", "slow steps of torch"))


@pytest.fixture
def built(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_REASON_FILE", tmp_path / "none.json")
    monkeypatch.setattr(native, "_extension", native._Extension(Extension()))


def findings(capsys) -> dict:
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def words(capsys) -> str:
    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_versions(capsys, missing):
    versions = findings(capsys)["versions"]
    assert versions["lightning-seq1f1b"] == lightning_seq1f1b.__version__
    assert versions["torch"] == torch.__version__
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(versions) == {"lightning-seq1f1b", "python", "torch", "lightning", "transformers"}


def test_without_the_extension(capsys, missing):
    found = findings(capsys)
    assert found["extension"]["available"] is False
    assert found["extension"]["reason"] == "c++ ended with status 1"
    assert found["extension"]["build"] is None
    assert found["cpu"]["variants"] == []
    on_cpu = [choice for choice in found["kernels"] if choice["device"] == "cpu"]
    assert [choice["dtype"] for choice in on_cpu] == CPU_DTYPES
    for choice in on_cpu:
        assert choice["kernel"] != kernels.NATIVE.name
        assert choice["passed_over"][kernels.NATIVE.name] == "c++ ended with status 1"
        assert choice["variant"] is None
    said = words(capsys)
    assert "not used: c++ ended with status 1" in said
    assert "    file.cpp: error" in said


def test_with_the_extension(capsys, built):
    found = findings(capsys)
    assert found["extension"]["available"] is True
    assert found["extension"]["reason"] is None
    assert found["extension"]["build"]["compiler"] == "GCC 12.2.0"
    assert found["cpu"] == {"threads": torch.get_num_threads(), "variants": ["generic", "avx2", "amx"]}
    chosen = {choice["dtype"]: choice for choice in found["kernels"] if choice["device"] == "cpu"}
    assert {choice["kernel"] for choice in chosen.values()} == {kernels.NATIVE.name}
    assert chosen["bfloat16"]["variant"] == "amx"
    assert chosen["float64"]["variant"] == "avx2"
    said = words(capsys)
    assert "built by GCC 12.2.0 against torch 2.13.0, for torch 2.10 and later" in said
    assert "cpu bfloat16: lightning_seq1f1b, amx" in said
    assert "for CUDA: not built" in said


def test_what_a_gpu_would_be_used_for(capsys, built, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = findings(capsys)
    assert found["cuda"] == {"torch": "13.0", "devices": [{"name": "a GPU", "capability": "9.0"}]}
    on_cuda = {choice["dtype"]: choice for choice in found["kernels"] if choice["device"] == "cuda"}
    assert list(on_cuda) == ["bfloat16", "float16", "float32"]
    assert on_cuda["bfloat16"]["passed_over"][kernels.NATIVE.name] == "the extension was built without CUDA"
    assert "device 0: a GPU, compute capability 9.0" in words(capsys)


def test_a_library_that_is_not_installed(capsys, missing, monkeypatch):
    monkeypatch.setattr(doctor, "LIBRARIES", ("torch", "no-such-library"))
    assert findings(capsys)["versions"]["no-such-library"] is None
    assert "no-such-library not installed" in words(capsys)


def test_a_setting_that_is_ignored_is_said(capsys, built, monkeypatch):
    extension = native._Extension(Extension(), warning="LIGHTNING_SEQ1F1B_CPU is ignored")
    monkeypatch.setattr(native, "_extension", extension)
    notice.say_once.cache_clear()
    assert "warning: LIGHTNING_SEQ1F1B_CPU is ignored" in words(capsys)


def test_the_libraries_are_not_imported():
    code = (
        "import sys\nfrom lightning_seq1f1b.cli.main import main\nassert main(['doctor']) == 0\n"
        "assert not {'lightning', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT, stdout=subprocess.DEVNULL)
