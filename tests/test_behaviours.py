"""The table of what Lightning's users expect is what the tests' markers say, and has no empty row."""

import os
import re
import subprocess
import sys

import pytest
from support.behaviours import PAGE, ROOT, UnknownBehaviourError, page

TEXTS = {"A group": {"1": "one thing", "2": "another"}, "refused": {"2": "it cannot work"}}


def rows(text: str) -> dict[int, list[str]]:
    """The cells of every numbered row."""
    found = re.findall(r"^\| (\d+) \| (.*) \| ?(.*) \|$", text, flags=re.MULTILINE)
    return {int(number): cells for number, *cells in found}


def test_the_page_is_what_the_markers_say():
    command = [sys.executable, "-m", "support.behaviours", "--print"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE.read_text(), "run `make behaviours`"


def test_no_row_is_empty_and_none_is_missing():
    table = rows(PAGE.read_text())
    assert sorted(table) == list(range(1, 52))
    assert {number: cells for number, cells in table.items() if not all(cell.strip() for cell in cells)} == {}


def test_rows_name_tests_by_file_and_say_what_is_refused():
    text = page({1: ["tests/a/test_b.py::test_c", "tests/a/test_b.py::test_d"], 2: ["tests/test_e.py::test_f"]}, TEXTS)
    assert rows(text) == {
        1: ["one thing", "`a/test_b.py`: `test_c`, `test_d`"],
        2: ["another", "refused: it cannot work<br>`test_e.py`: `test_f`"],
    }


def test_a_number_that_is_not_in_the_list_is_an_error():
    with pytest.raises(UnknownBehaviourError, match=r"3: \['test_e.py::test_f'\]"):
        page({3: ["test_e.py::test_f"]}, TEXTS)
