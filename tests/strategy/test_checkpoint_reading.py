"""Files that are no whole checkpoint are refused with what they are; nothing in any file is executed."""

from __future__ import annotations

import os
import pickle
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_seq1f1b.strategy.checkpoint_reading import read_checkpoint

STATE = {"weight": torch.arange(100_000.0)}
CONTENT = {"state_dict": STATE, "callbacks": {"score": torch.tensor(1.5), "list": [torch.ones(2), ("a", 1)]}}


class Touches:
    """What a pickle of it does when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("new_format", [True, False])
def test_a_checkpoint_is_read(tmp_path, new_format):
    torch.save(CONTENT, tmp_path / "a.ckpt", _use_new_zipfile_serialization=new_format)
    read = read_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(read["state_dict"]["weight"], STATE["weight"])
    assert torch.equal(read["callbacks"]["score"], torch.tensor(1.5))
    assert read["callbacks"]["list"][1] == ("a", 1)


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_weights_stay_in_the_file_and_nothing_else_keeps_it(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save(CONTENT, path)
    read = read_checkpoint(path)
    assert mapped(path)
    assert read["state_dict"]["weight"][-1] == 99_999
    del read["state_dict"]
    assert not mapped(path)
    assert torch.equal(read["callbacks"]["list"][0], torch.ones(2))


def cut(path: Path, part: float) -> None:
    torch.save(CONTENT, path)
    os.truncate(path, int(path.stat().st_size * part))


def overwritten(path: Path) -> None:
    torch.save(CONTENT, path)
    with path.open("r+b") as file:
        file.seek(50)
        file.write(bytes(range(256)) * 4)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: None, "FileNotFoundError: Checkpoint file not found: {}"),
        (Path.touch, "ValueError: {} is empty"),
        (lambda path: path.write_bytes(b"\x01" * 5000), "ValueError: {} is no checkpoint: it does not begin like"),
        (lambda path: path.write_bytes(b"\x80\x99" * 5000), "ValueError: {} is cut off or damaged"),
        (lambda path: path.write_text("weights: none"), "ValueError: {} is no checkpoint: it does not begin like"),
        (lambda path: save_file(STATE, path), "ValueError: {} is a safetensors file"),
        (lambda path: cut(path, 0.05), "ValueError: {} is cut off or damaged"),
        (lambda path: cut(path, 0.5), "ValueError: {} is cut off or damaged"),
        (lambda path: cut(path, 0.999), "ValueError: {} is cut off or damaged"),
        (overwritten, "ValueError: {} is cut off or damaged"),
        (lambda path: torch.save(STATE, path), "ValueError: {} holds weights only (1 tensors), and is no checkpoint"),
        (lambda path: torch.save([1], path), "ValueError: {} is no checkpoint of a Trainer: it has no entry"),
        (
            lambda path: torch.save({**CONTENT, "mine": Fraction(1, 3)}, path),
            "UnpicklingError: {} holds fractions.Fraction, which is no tensor or plain value",
        ),
    ],
)
def test_anything_else_is_refused_with_what_it_is(tmp_path, write, reason):
    path = tmp_path / "a.ckpt"
    write(path)
    with pytest.raises((ValueError, FileNotFoundError, pickle.UnpicklingError)) as error:
        read_checkpoint(path)
    text = f"{type(error.value).__name__}: {error.value}"
    assert text.startswith(reason.format(path))
    assert len(text.splitlines()) == 1


def test_what_is_more_than_values_is_read_when_it_is_trusted(tmp_path):
    torch.save({**CONTENT, "mine": Fraction(1, 3)}, tmp_path / "a.ckpt")
    assert read_checkpoint(tmp_path / "a.ckpt", weights_only=False)["mine"] == Fraction(1, 3)


def test_code_is_not_run(tmp_path):
    torch.save({**CONTENT, "mine": Touches(tmp_path / "touched")}, tmp_path / "a.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        read_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "touched").exists()
