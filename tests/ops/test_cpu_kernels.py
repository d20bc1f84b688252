"""The CPU kernels of every instruction set against their formulas, on random problems with every memory guarded."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import pytest
from support.commands import run_command
from support.kernel_fuzz import CSRC, ROOT, Driver, compiler_knows

from lightning_seq1f1b.ops import native

CASES, SEED = 300, 1
EMULATED = "amx (emulated)"


def processor_flags() -> set[str]:
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return set(found[1].split()) if found else set()


def expected_variants() -> set[str]:
    """What this machine's driver has to test, by what Linux says of the processor."""
    flags = processor_flags()
    expected = {"generic", *native.cpu_variants()}
    if compiler_knows("avx2") and {"avx2", "fma", "f16c"} <= flags:
        expected.add("avx2")
    if compiler_knows("avx512") and {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags:
        expected.add("avx512")
    if compiler_knows("amx") and "avx512_bf16" in flags:
        expected.add("amx" if "amx_bf16" in flags else EMULATED)
    return expected


def variants_in(output: str) -> set[str]:
    found = re.search(r"^\d+ cases: (.*), all agree with the formulas$", output, re.MULTILINE)
    assert found, output
    return set(found[1].split(", "))


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Driver:
    return Driver(tmp_path_factory.mktemp("kernel_fuzz"))


def changed(folder: Path, file: str, line: str, instead: str) -> Path:
    """A copy of the sources in which one line of a file of csrc/cpu is another."""
    copy = folder / "csrc"
    shutil.copytree(CSRC, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = copy / "cpu" / file
    text = source.read_text()
    assert text.count(line) == 1, f"{file} was rewritten: this test has to change another line than {line!r}"
    source.write_text(text.replace(line, instead))
    return copy


def driver_of(driver: Driver, folder: Path, variant: str, change: tuple[str, str, str]) -> Driver:
    """The driver with one variant compiled anew from changed sources."""
    unchanged = {name: path for name, path in driver.objects.items() if name != f"flash_{variant}"}
    return Driver(folder, unchanged, changed(folder, *change))


def test_every_variant_agrees_with_the_formulas(driver):
    run = driver.run(CASES, SEED)
    assert run.status == 0, run.output
    assert variants_in(run.output) == expected_variants()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("forward.h", ": p.scale * log2e);", ": p.scale * 1.44);"), "(output|lse)"),
        (("forward.h", "((ids[n] >= first) &", "((ids[n] > first) &"), "(output|lse)"),
        (("backward.h", "type.store(gradient, p.size,", "type.store(gradient, p.size + 1,"), "query gradient"),
    ],
    ids=["scale", "mask", "write outside"],
)
def test_a_wrong_kernel_is_found(driver, tmp_path, change, complaint):
    run = driver_of(driver, tmp_path, "generic", change).run(CASES, SEED)
    assert run.status == 1, run.output
    assert re.match(rf"case \d+ of seed {SEED}: generic: {complaint}.*\n  dtype=\w+ rows=\d", run.output), run.output


def test_a_wrong_amx_kernel_is_found(driver, tmp_path):
    change = ("amx_tiles.h", "add_product<3, 5, 7>();", "add_product<3, 5, 6>();")
    run = driver_of(driver, tmp_path, "amx", change).run(CASES, SEED)
    assert run.status == bool(expected_variants() & {"amx", EMULATED}), run.output
    assert run.status == 0 or re.match(rf"case \d+ of seed {SEED}: amx: output.*\n  dtype=bfloat16", run.output)


def test_the_emulation_refuses_what_a_processor_would(driver, tmp_path):
    change = ("amx_tiles.h", "    request_tiles();\n", "")
    run = driver_of(driver, tmp_path, "amx", change).run(1, SEED)
    if EMULATED in expected_variants():
        assert run.status == -signal.SIGILL
        assert "illegal instruction: the tiles are configured before the process has asked for them" in run.output
    else:
        assert run.status == 0, run.output  # where there is AMX, looking for it asks for the tiles as well


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sanitizers_have_nothing_to_say(tmp_path):
    done = run_command([ROOT / ".ci" / "sanitize", "20", str(SEED), tmp_path], ROOT, timeout_s=800)
    assert done.status == 0, done.output
    assert variants_in(done.output) == expected_variants()
