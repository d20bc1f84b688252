"""Loading the extension: what is said where it is missing, switched off, or asked for a variant that it lacks."""

from __future__ import annotations

import json
import os
import warnings

import pytest
import torch

from lightning_seq1f1b.ops import native, notice


class Extension:
    """Stands in for the compiled module."""

    def __init__(self) -> None:
        self.variant = ""

    def cpu_variants(self) -> list[str]:
        return ["generic", "avx2"]

    def cpu_variant(self, dtype: str) -> str:
        return f"{dtype} by {self.variant or 'avx2'}"

    def use_cpu_variant(self, name: str) -> None:
        if name not in ("", *self.cpu_variants()):
            raise ValueError(f"no variant '{name}'; available are: generic, avx2")
        self.variant = name

    def build_info(self) -> str:
        cuda = {"version": "13.0", "architectures": ["80", "90"]}
        info = {"compiler": "GCC 12", "torch": "2.13.0", "torch_abi": "2.10", "cpu_variants": ["generic"], "cuda": cuda}
        return json.dumps(info)


@pytest.fixture(autouse=True)
def _not_loaded_yet(monkeypatch):
    monkeypatch.setattr(native, "_extension", None)
    for name in (native.SWITCH, native.VARIANT, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    notice.say_once.cache_clear()


@pytest.fixture
def missing(monkeypatch, tmp_path):
    """No extension; returns the file in which an installation says why."""
    monkeypatch.setattr(native, "MODULE", "lightning_seq1f1b._no_such_extension")
    monkeypatch.setattr(native, "_REASON_FILE", tmp_path / "reason.json")
    return tmp_path / "reason.json"


@pytest.fixture
def built(monkeypatch):
    extension = Extension()
    monkeypatch.setattr(native.importlib, "import_module", {native.MODULE: extension}.__getitem__)
    return extension


def said(use) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
    assert all(issubclass(warning.category, UserWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


def test_a_missing_extension_is_said_once_with_the_reason_and_what_to_do(missing):
    missing.write_text(json.dumps({"reason": "no compiler was found", "details": ""}))
    messages = said(lambda: [native.available(), native.available(), native.available()])
    assert len(messages) == 1
    for part in (
        "no compiler was found",
        "torch",
        "--force-reinstall --no-deps --no-cache-dir",
        "lightning-seq1f1b doctor",
        "C++ compiler",
    ):
        assert part in messages[0]
    assert not native.available()
    assert native.reason() == "no compiler was found"
    assert native.build_details() is None


def test_what_the_compiler_printed_is_kept(missing):
    missing.write_text(json.dumps({"reason": "it failed", "details": "line 3: error"}))
    assert native.build_details() == "line 3: error"


def test_asking_for_the_reason_does_not_warn(missing):
    assert said(native.reason) == []
    assert native.reason() == "this copy of the package was never built"


def test_without_it_there_are_no_variants_and_no_build(missing):
    assert native.cpu_variants() == ()
    for use in (native.build_info, lambda: native.cpu_variant(torch.float32), lambda: native.use_cpu_variant("")):
        with pytest.raises(RuntimeError, match="never built"):
            use()


def test_an_extension_that_does_not_load_says_why(monkeypatch, tmp_path):
    def refuse(name: str) -> None:
        raise ImportError("undefined symbol: torch_parallel_for")

    monkeypatch.setattr(native.importlib, "import_module", refuse)
    monkeypatch.setattr(native, "_REASON_FILE", tmp_path / "none")
    (message,) = said(native.available)
    assert "undefined symbol: torch_parallel_for" in message
    assert torch.__version__ in message


def test_switched_off_it_is_not_loaded_and_not_missed(monkeypatch, built):
    monkeypatch.setenv(native.SWITCH, "off")
    assert said(native.available) == []
    assert not native.available()
    assert native.reason() == "switched off by LIGHTNING_SEQ1F1B_NATIVE=off"


@pytest.mark.parametrize("switch", [None, "auto", "on"])
def test_a_built_extension_is_used_without_a_word(monkeypatch, built, switch):
    if switch:
        monkeypatch.setenv(native.SWITCH, switch)
    assert said(native.available) == []
    assert native.available()
    assert native.reason() is None
    assert native.cpu_variants() == ("generic", "avx2")
    assert native.cpu_variant(torch.bfloat16) == "bfloat16 by avx2"
    cuda = native.CudaBuild("13.0", ("80", "90"))
    assert native.build_info() == native.BuildInfo("GCC 12", "2.13.0", "2.10", ("generic",), cuda)


def test_a_variant_is_chosen_by_the_environment(monkeypatch, built):
    monkeypatch.setenv(native.VARIANT, "generic")
    assert said(native.available) == []
    assert native.cpu_variant(torch.float32) == "float32 by generic"
    native.use_cpu_variant("")
    assert native.cpu_variant(torch.float32) == "float32 by avx2"


def test_an_unknown_variant_is_said_once_with_those_there_are(monkeypatch, built):
    monkeypatch.setenv(native.VARIANT, "avx1024")
    messages = said(lambda: [native.available(), native.available()])
    assert len(messages) == 1
    for part in (native.VARIANT, "avx1024", "generic, avx2"):
        assert part in messages[0]
    assert native.available()


def test_only_the_first_rank_of_a_node_warns(monkeypatch, missing):
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "1")
    assert said(native.available) == []


def test_a_switch_that_is_none(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "perhaps")
    with pytest.raises(ValueError, match="LIGHTNING_SEQ1F1B_NATIVE is auto, on or off, not 'perhaps'"):
        native.load()


def test_a_reason_that_cannot_be_read(monkeypatch, tmp_path):
    reason = tmp_path / "reason.json"
    reason.write_text("{")
    monkeypatch.setattr(native, "_REASON_FILE", reason)
    assert native.build_details() is None
