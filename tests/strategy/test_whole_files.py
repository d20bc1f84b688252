"""What is written aside is whole under its name or not there, whatever ends the process that writes it."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_seq1f1b.strategy import whole_files
from lightning_seq1f1b.strategy.whole_files import WholeDirectory, new_job, put_back, remove, whole_file

FILES = 20


def write_file(path: Path, text: str) -> None:
    with whole_file(path) as file:
        for _ in range(FILES):
            file.write(text.encode() * 1000)


def write_directory(path: Path, text: str) -> None:
    place = WholeDirectory.replacing(path, new_job())
    place.make()
    for number in range(FILES):
        (place.aside / str(number)).write_text(text * 1000)
    place.finish()


def content(path: Path) -> str:
    """What was written, which has to be there as a whole."""
    texts = [file.read_text() for file in sorted(path.iterdir())] if path.is_dir() else [path.read_text()]
    (letter,) = {letter for text in texts for letter in text}
    assert sum(map(len, texts)) == FILES * 1000
    return letter


FORMS = pytest.mark.parametrize("write", [write_file, write_directory])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def apart(function: Callable[..., None], *args: object) -> multiprocessing.Process:
    """A process that runs the function: a fork, which is there at once."""
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    return process


# ---- the new one takes the place of the old one --------------------------------------------------------------------


@pytest.mark.parametrize("first", [None, write_file, write_directory])
@FORMS
@pytest.mark.parametrize("exchange", [True, False], ids=["one step", "two steps"])
def test_replaces_whatever_was_there(tmp_path, monkeypatch, write, first, exchange):
    if not exchange:  # as on file systems that cannot
        monkeypatch.setattr(whole_files, "_exchange", lambda *_: False)
    path = tmp_path / "deep" / "last.ckpt"
    if first is not None:
        first(path, "a")
    write(path, "b")
    assert content(path) == "b"
    assert names(path.parent) == ["last.ckpt"]


@FORMS
def test_a_link_is_replaced_and_what_it_points_to_is_not(tmp_path, write):
    write(tmp_path / "epoch=1.ckpt", "a")
    (tmp_path / "last.ckpt").symlink_to("epoch=1.ckpt")
    write(tmp_path / "last.ckpt", "b")
    assert [content(tmp_path / name) for name in ("epoch=1.ckpt", "last.ckpt")] == ["a", "b"]
    assert names(tmp_path) == ["epoch=1.ckpt", "last.ckpt"]


# ---- what is not finished ------------------------------------------------------------------------------------------


def write_and_raise(path: Path) -> None:
    with whole_file(path) as file:
        file.write(b"half")
        raise KeyError


def test_an_error_leaves_the_old_one_and_nothing_else(tmp_path):
    write_file(tmp_path / "a", "a")
    with pytest.raises(KeyError):
        write_and_raise(tmp_path / "a")
    place = WholeDirectory.replacing(tmp_path / "a", new_job())
    place.make()
    (place.aside / "half").touch()
    place.drop()
    assert content(tmp_path / "a") == "a"
    assert names(tmp_path) == ["a"]


@FORMS
def test_a_place_below_a_file_is_told_so(tmp_path, write):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        write(tmp_path / "file" / "a", "a")


def fill_the_disk(path: Path, said: Path) -> None:
    import torch

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        with whole_file(path) as file:
            torch.save({"weight": torch.ones(100_000)}, file)
    except OSError as error:
        said.write_text(f"{type(error).__name__} {error.strerror}")


def test_a_full_disk_is_the_systems_error_and_leaves_the_old_one(tmp_path):
    """Not the error of torch, which hides the reason."""
    write_file(tmp_path / "a", "a")
    apart(fill_the_disk, tmp_path / "a", tmp_path / "said").join(60)
    assert (tmp_path / "said").read_text() == "OSError File too large"
    assert content(tmp_path / "a") == "a"
    assert names(tmp_path) == ["a", "said"]


def write_for_ever(write: Callable[[Path, str], None], path: Path) -> None:
    while True:
        for letter in "abc":
            write(path, letter)


@FORMS
def test_killed_at_any_moment_something_whole_is_there(tmp_path, write):
    path, chance = tmp_path / "last.ckpt", random.Random(0)
    write(path, "a")
    left = 0
    for _ in range(20):
        process = apart(write_for_ever, write, path)
        time.sleep(chance.uniform(0.01, 0.05))
        process.kill()
        process.join()
        assert content(path) in "abc"
        left += len(names(tmp_path)) - 1
    assert left  # some were killed while they wrote
    write(path, "d")
    assert content(path) == "d"
    assert names(tmp_path) == ["last.ckpt"]


def die_between_two_steps(path: Path) -> None:
    whole_files._exchange = lambda *_: False
    replaced = []

    def replace(place: Path, to: Path) -> None:
        if replaced:
            os._exit(1)
        replaced.append(to)
        os.rename(place, to)

    Path.replace = replace
    write_directory(path, "b")


def test_what_was_taken_away_in_the_first_of_two_steps_is_put_back(tmp_path):
    path = tmp_path / "hpc_ckpt_1.ckpt"
    for again in (put_back, lambda path: write_file(path.with_name("other"), "c")):
        write_directory(path, "a")
        apart(die_between_two_steps, path).join(60)
        assert not path.exists()
        again(path)
        assert content(path) == "a"
    assert names(tmp_path) == ["hpc_ckpt_1.ckpt", "other"]


def hold(path: Path, ready: Path) -> None:
    with whole_file(path):
        ready.touch()
        time.sleep(60)


def test_what_another_process_is_writing_is_no_leftover(tmp_path):
    ready = tmp_path / "ready"
    process = apart(hold, tmp_path / "epoch=1.ckpt", ready)
    deadline = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    write_file(tmp_path / "epoch=2.ckpt", "a")
    (aside,) = tmp_path.glob(".epoch=1.ckpt.*.unfinished")
    process.kill()
    process.join()
    assert aside.exists()
    write_file(tmp_path / "epoch=2.ckpt", "b")
    assert names(tmp_path) == ["epoch=2.ckpt", "ready"]


def test_other_hidden_files_are_left_alone(tmp_path):
    for name in (".hidden", ".a.unfinished", ".a.12345678.finished", "a.12345678.unfinished"):
        (tmp_path / name).touch()
    before = names(tmp_path)
    write_file(tmp_path / "a", "a")
    assert names(tmp_path) == sorted([*before, "a"])


def test_lightning_counts_nothing_unfinished_as_a_checkpoint(tmp_path):
    """It takes all digits of every name with "ckpt_" in it for the number of a checkpoint."""
    with whole_file(tmp_path / "hpc_ckpt_7.ckpt"):
        assert not [name for name in names(tmp_path) if "ckpt_" in name]
    assert names(tmp_path) == ["hpc_ckpt_7.ckpt"]


# ---- removing ------------------------------------------------------------------------------------------------------


@FORMS
def test_removes_what_is_there_and_turns_the_link_to_the_successor(tmp_path, write):
    for name in ("epoch=1.ckpt", "epoch=2.ckpt"):
        write(tmp_path / name, "a")
    (tmp_path / "last.ckpt").symlink_to("epoch=1.ckpt")
    (tmp_path / "mine.ckpt").symlink_to("epoch=1.ckpt")
    remove(tmp_path / "epoch=1.ckpt", tmp_path / "epoch=2.ckpt")
    assert (tmp_path / "last.ckpt").readlink() == Path("epoch=2.ckpt")
    assert (tmp_path / "mine.ckpt").readlink() == Path("epoch=1.ckpt")
    remove(tmp_path / "last.ckpt")
    remove(tmp_path / "mine.ckpt")
    remove(tmp_path / "nothing.ckpt")
    assert names(tmp_path) == ["epoch=2.ckpt"]


def test_a_new_directory_must_be_new_or_empty(tmp_path):
    (tmp_path / "empty").mkdir()
    place = WholeDirectory.new(tmp_path / "empty", new_job())
    place.make()
    place.finish()
    write_directory(tmp_path / "full", "a")
    write_file(tmp_path / "file", "a")
    for name in ("full", "file"):
        with pytest.raises(ValueError, match="choose a new or empty directory"):
            WholeDirectory.new(tmp_path / name, new_job())
