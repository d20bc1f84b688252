"""The arrows between the parts, the size of files, and what importing costs, asserted instead of wished."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_seq1f1b"
PARTS = ("schedule", "ops", "runtime", "models", "strategy", "callbacks", "cli")
ARROWS = {
    "schedule": set(),
    "ops": set(),
    "runtime": {"schedule", "ops"},
    "models": {"schedule", "ops", "runtime"},
    "strategy": {"schedule", "ops", "runtime", "models"},
    "callbacks": {"schedule", "ops", "runtime", "models", "strategy"},
    "cli": {"schedule", "ops", "runtime", "models", "strategy", "callbacks"},
}
OUTSIDE = {
    "schedule": set(),
    "ops": {"torch"},
    "runtime": {"torch"},
    "models": {"torch", "transformers"},
}
MAX_LINES = 400


def imported(path: Path) -> set[str]:
    """Absolute names of everything a file imports, at any depth of nesting."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def part_of(name: str) -> str | None:
    head, *rest = name.split(".")
    return rest[0] if head == "lightning_seq1f1b" and rest and rest[0] in PARTS else None


@pytest.mark.parametrize("part", PARTS)
def test_nothing_points_back(part):
    files = list((PACKAGE / part).rglob("*.py"))
    assert files
    for path in files:
        parts = {part_of(name) for name in imported(path)} - {None, part}
        assert parts <= ARROWS[part], f"{path} imports {parts - ARROWS[part]}"


@pytest.mark.parametrize("part", list(OUTSIDE))
def test_parts_import_only_the_libraries_they_may(part):
    for path in (PACKAGE / part).rglob("*.py"):
        heads = {name.split(".")[0] for name in imported(path)} - {"lightning_seq1f1b"} - set(sys.stdlib_module_names)
        assert heads <= OUTSIDE[part], f"{path} imports {heads - OUTSIDE[part]}"


def test_only_strategy_callbacks_and_cli_know_lightning():
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in ("strategy", "callbacks", "cli"):
            assert not any(name.split(".")[0] == "lightning" for name in imported(path)), path


def test_files_hold_one_idea():
    lines = {path.name: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}
    assert not {path.stem for path in PACKAGE.rglob("*.py")} & {"utils", "helpers", "common", "misc"}


def test_the_package_imports_neither_torch_nor_lightning():
    code = (
        "import sys, lightning_seq1f1b, lightning_seq1f1b.schedule.plan, lightning_seq1f1b.cli.schedule\n"
        "heavy = {'torch', 'lightning', 'transformers', 'numpy'} & {name.split('.')[0] for name in sys.modules}\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=PACKAGE.parent)


def test_public_names_resolve():
    import lightning_seq1f1b

    for name in lightning_seq1f1b.__all__:
        assert getattr(lightning_seq1f1b, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lightning_seq1f1b.nothing  # noqa: B018
