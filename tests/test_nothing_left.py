"""A run of the suite that leaves something on the machine is a failed run, and says what it left."""

import os
import re
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, run_command

TIDY = """
from support.processes import run_processes

def test_tidy():
    assert run_processes(max, 2, 1) == [1, 1]
"""

UNTIDY = """
import os
import socket
import subprocess
import time
import conftest

conftest.GONE_S = 0.5
KEPT = []

def test_untidy():
    # Its parent ends at once, so it is nobody's child.
    subprocess.run("sleep 61 & echo $!", shell=True, check=True)
    KEPT.append(socket.create_server(("127.0.0.1", 0)))
    print("listening", KEPT[0].getsockname()[1])
    with open(f"/dev/shm/{os.environ['LEFT_MEMORY']}", "w") as entry:
        entry.write("left")
"""


def run_pytest(tmp_path, content, *options, **environment):
    file = tmp_path / "test_generated.py"
    file.write_text(content)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-s", *options, file]
    search = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return run_command(command, tmp_path, 100.0, PYTHONPATH=search, **environment)


@pytest.fixture
def memory(tmp_path):
    entry = Path("/dev/shm") / f"left-by-{tmp_path.parent.name}-{tmp_path.name}-{os.getpid()}"
    yield entry
    entry.unlink(missing_ok=True)


def test_a_tidy_run_passes(tmp_path):
    finished = run_pytest(tmp_path, TIDY)
    assert finished.status == 0, finished.output
    assert "left behind" not in finished.output


def test_an_untidy_run_fails_with_a_list_and_is_cleaned_up(tmp_path, memory):
    finished = run_pytest(tmp_path, UNTIDY, LEFT_MEMORY=memory.name)
    assert finished.status == 1, finished.output
    assert "1 passed" in finished.output
    left = finished.output.partition("left behind by the tests:")[2]
    process = re.search(r"process (\d+), .*sleep 61", left)
    assert process, finished.output
    assert re.search(r"listening (\d+)", finished.output)[1] == re.search(r"listening port (\d+)", left)[1]
    assert f"/dev/shm/{memory.name}" in left
    assert not Path(f"/proc/{process[1]}").exists()
