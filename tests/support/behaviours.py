"""Write docs/lightning.md: what users expect of a strategy, and the tests that show it. `make behaviours`."""

from __future__ import annotations

import contextlib
import io
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "lightning.md"
TEXTS = ROOT / "tests" / "behaviours.toml"

HEAD = """# What Lightning's users expect

Lightning promises much around the training step: hooks, decisions, logging, checkpoints, ways to start and to fail.
This is the list of what users rely on, and for each item the tests that show it under a pipeline, usually by doing the
same on one device or under DDP. `make behaviours` writes the page from the tests' markers.

The strategy belongs to `lightning.pytorch`: import the Trainer and your modules from there (`import lightning as L`).
`pytorch_lightning` has the same classes a second time, and its Trainer takes no strategy of the other namespace.
"""


class UnknownBehaviourError(ValueError):
    """A test's marker has a number that the list does not have."""


class _Marked:
    """A plugin of pytest that writes down which tests carry which number."""

    def __init__(self) -> None:
        self.tests: dict[int, list[str]] = defaultdict(list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for marker in item.iter_markers("behaviour"):
                tests = self.tests[marker.args[0]]
                name = item.nodeid.split("[")[0]
                if name not in tests:
                    tests.append(name)


def marked_tests() -> dict[int, list[str]]:
    """Names of the tests that show each behaviour, whatever their parameters, in the order of the files."""
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "behaviour" in path.read_text())
    marked, said = _Marked(), io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main(["--collect-only", "-q", "--rootdir", str(ROOT), *map(str, files)], plugins=[marked])
    if status:
        raise RuntimeError(f"the tests cannot be collected:\n{said.getvalue()}")
    return marked.tests


def page(tests: Mapping[int, Iterable[str]], texts: Mapping[str, Mapping[str, str]]) -> str:
    """The page.

    Args:
        tests: names of tests, by the number of the behaviour they show.
        texts: behaviours by number, by the group they belong to; "refused" is why some are an error instead.

    Raises:
        UnknownBehaviourError: A test has a number that no behaviour has.
    """
    refused = texts.get("refused", {})
    groups = {name: group for name, group in texts.items() if name != "refused"}
    known = {int(number) for group in groups.values() for number in group}
    if unknown := {number: list(names) for number, names in tests.items() if number not in known}:
        raise UnknownBehaviourError(f"no behaviour has the number of these tests' markers: {unknown}")
    parts = [HEAD]
    for name, group in groups.items():
        rows = [
            f"| {number} | {text} | {_shown(tests.get(int(number), ()), refused.get(number))} |"
            for number, text in group.items()
        ]
        parts.append("\n".join([f"## {name}\n", "| | what | shown by |", "| --- | --- | --- |", *rows, ""]))
    return "\n".join(parts)


def _shown(tests: Iterable[str], refused: str | None) -> str:
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        file, name = test.removeprefix("tests/").split("::", 1)
        by_file[file].append(f"`{name}`")
    cells = [] if refused is None else [f"refused: {refused}"]
    cells += [f"`{file}`: {', '.join(names)}" for file, names in by_file.items()]
    return "<br>".join(cells)


def written() -> str:
    """The page as it should be now."""
    return page(marked_tests(), tomllib.loads(TEXTS.read_text()))


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(written(), end="")
    else:
        PAGE.write_text(written())
        print(f"{PAGE.relative_to(ROOT)} is written")
