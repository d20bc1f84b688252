"""What the README shows is what the commands print, and its Python is Python."""

import re
import shlex
from pathlib import Path

import pytest

from lightning_seq1f1b.cli.main import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def shown_commands() -> list[tuple[str, str]]:
    """Every `$ command` of the text blocks with what the README shows below it."""
    pieces = re.split(r"^\$ ", "\n".join(blocks("text")), flags=re.MULTILINE)[1:]
    return [tuple(piece.split("\n", 1)) for piece in pieces]


@pytest.mark.parametrize(("command", "output"), shown_commands())
def test_commands_print_what_is_shown(command, output, capsys):
    program, *arguments = shlex.split(command)
    assert program == "lightning-seq1f1b"
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip() == output.strip()


def test_there_are_commands_to_check():
    assert len(shown_commands()) >= 2


@pytest.mark.parametrize("code", blocks("python"))
def test_python_compiles(code):
    compile(code, "README.md", "exec")


def test_files_that_are_named_exist():
    root = Path(__file__).parents[1]
    named = re.findall(r"`((?:lightning_seq1f1b|docs|examples)/[\w./]+)`", README)
    named += re.findall(r"\]\((?!http)([\w./-]+)\)", README)
    assert named
    assert [name for name in named if not (root / name).exists()] == []
