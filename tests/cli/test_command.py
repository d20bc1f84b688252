"""The command itself: what it says of itself, and that it imports only what a command needs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

import lightning_seq1f1b
from lightning_seq1f1b.cli.main import COMMANDS, main

NO_TORCH = """
import sys
sys.modules["torch"] = sys.modules["lightning"] = None
from lightning_seq1f1b.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("argument", ["-h", "--help"])
def test_help_lists_every_command_on_a_line(capsys, argument):
    assert main([argument]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for command in COMMANDS:
        assert any(len(line) > 3 and line[0] == command for line in lines), command


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_describes_itself(capsys, command):
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert f"usage: lightning-seq1f1b {command}" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"lightning-seq1f1b {lightning_seq1f1b.__version__}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "a command is missing"),
        (["fti"], "unknown command 'fti'; did you mean 'fit'?"),
        (["bake"], "unknown command 'bake'; --help lists them"),
        (["--verbose", "fit"], "unknown command '--verbose'"),
    ],
)
def test_an_unknown_command_ends_with_status_2(capsys, argv, message):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["schedule", "verify", "--stages", "2"]])
def test_torch_is_not_imported_where_it_is_not_needed(argv):
    options = ["--microbatches", "2", "--chunks", "2"] if argv[0] == "schedule" else []
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *argv, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "lightning_seq1f1b", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown command 'nonsense'" in done.stderr


@pytest.mark.parametrize("argv", [["--help"], ["schedule", "draw"], ["doctor"]])
def test_a_reader_that_has_gone_ends_the_command_quietly(argv):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "lightning_seq1f1b", *argv]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
