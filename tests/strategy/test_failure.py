"""Whatever happens on one rank ends all of them soon, and the user's own error is what is printed last."""

import os
import re
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from support.commands import ROOT, run_command
from support.endings import run_to_the_end, seconds_since_failure
from support.failing import HOLDING_S, MESSAGE, UsersError, main
from support.signalled import Signal
from support.signalled import main as train_and_save

from lightning_seq1f1b.strategy.failure import FailureBoard

WORLD_SIZE = 3
LIMIT_S = 20
PATIENCE_S = 8.0
PLACES = {
    "setup": "in setup",
    "before a collective": "in on_train_start",
    "step": "in training_step",
    "forward": "in the forward of microbatch 0, chunk 0",
    "backward": "in the backward of microbatch 0, chunk 2",
    "data": "in the data loader",
    "callback": "in FailingCallback.on_train_batch_end",
}
"""Where a rank fails, and what is said of it."""

BUSY, HOST_KILLED, TWO_KILLED = ("step, others busy", 0, 3), ("killed, others busy", 0, 3), ("all others killed", 1, 3)
STOPPED, STALLED, DATA_STALLS = (("stopped", 1, 3), ("stalled", 1, 2), ("data stalls", 0, 2))
HOLDING, NAN, MEMORY = ("holds the interpreter", 1, 2), ("nan", 1, 2), ("memory", 1, 2)
TOGETHER = (BUSY, HOST_KILLED, TWO_KILLED, STOPPED, STALLED, DATA_STALLS, HOLDING, NAN, MEMORY)
"""Places, ranks and numbers of processes of what takes its time, and therefore runs side by side."""

SAVING = tuple((place, rank) for place in ("step", "forward", "data", "callback") for rank in (0, 1))
"""Where one of two ranks fails that has callbacks which save on exceptions."""

SCRIPTS = [("step", 0), ("step, others busy", 1)]
"""Of two ranks, started by the script itself: rank 0 is the parent of rank 1."""


def last_lines(output):
    """The last lines that are not empty: the user's own, where it was raised, and one that the launcher may add."""
    return [line for line in output.splitlines() if line.strip()][-3:]


@pytest.mark.behaviour(46)
@pytest.mark.parametrize("rank", [0, WORLD_SIZE - 1])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_on_one_rank_ends_all_and_is_printed_last(tmp_path, place, rank):
    ending = run_to_the_end(main, WORLD_SIZE, tmp_path / "output", place, rank, WORLD_SIZE)
    assert ending.statuses == [1] * WORLD_SIZE, ending.output
    assert ending.seconds < LIMIT_S
    assert any(MESSAGE in line for line in last_lines(ending.output)), ending.output
    words = f"rank {rank} (stage {rank} of replica 0, {PLACES[place]})"
    assert ending.output.count(f"{words} failed first") == WORLD_SIZE - 1, ending.output
    assert ending.output.count(f"raised on {words}") == 1


@pytest.mark.behaviour(46)
@pytest.mark.parametrize("rank", [0, WORLD_SIZE - 1])
def test_a_killed_rank_takes_the_others_along(tmp_path, rank):
    ending = run_to_the_end(main, WORLD_SIZE, tmp_path / "output", "killed", rank, WORLD_SIZE)
    assert ending.statuses == [-9 if each == rank else 1 for each in range(WORLD_SIZE)], ending.output
    assert ending.seconds < LIMIT_S
    assert_last(ending, f"rank {rank} (stage {rank} of replica 0) has gone without a word: it was killed")


def assert_last(ending, text):
    assert any(text in line for line in last_lines(ending.output)), ending.output


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """The endings of `TOGETHER`, by case."""
    folder = tmp_path_factory.mktemp("together")

    def run(case):
        waits = case in (STOPPED, STALLED, DATA_STALLS)
        patience_s = PATIENCE_S if waits else 100.0
        return run_to_the_end(main, case[2], folder / str(TOGETHER.index(case)), *case, patience_s)

    with ThreadPoolExecutor(5) as pool:
        return dict(zip(TOGETHER, pool.map(run, TOGETHER), strict=True))


@pytest.mark.behaviour(46)
def test_busy_ranks_are_ended_with_the_error_of_the_rank_that_failed(endings):
    ending = endings[BUSY]
    assert ending.statuses == [1] * WORLD_SIZE
    assert ending.seconds < LIMIT_S
    assert_last(ending, MESSAGE)


@pytest.mark.behaviour(46)
def test_busy_ranks_are_ended_when_rank_0_was_killed(endings):
    ending = endings[HOST_KILLED]
    assert ending.statuses == [-9, 1, 1], ending.output
    assert ending.seconds < LIMIT_S, ending.output
    gone = "rank 0 (stage 0 of replica 0) has gone without a word"
    assert all(gone in line for line in last_lines(ending.output)[1:]), ending.output


@pytest.mark.behaviour(46)
def test_ranks_that_are_killed_at_once_are_all_named(endings):
    ending = endings[TWO_KILLED]
    assert ending.statuses == [-9, 1, -9], ending.output
    assert ending.seconds < LIMIT_S
    gone = "rank 0 (stage 0 of replica 0) and rank 2 (stage 2 of replica 0) have gone without a word: they were killed"
    assert_last(ending, gone)


@pytest.mark.behaviour(46)
def test_a_stopped_rank_ends_the_others_when_their_patience_does(endings):
    ending = endings[STOPPED]
    assert ending.statuses == [1, -9, 1], ending.output
    assert PATIENCE_S < ending.seconds < PATIENCE_S + LIMIT_S
    assert_last(ending, "rank 1 (stage 1 of replica 0) does not answer: it is stopped")
    assert re.search(r"^   0      0 +\d+\.\d  waiting for", ending.output, re.MULTILINE), ending.output
    assert re.search(r"^   2      2 +\d+\.\d  waiting for", ending.output, re.MULTILINE), ending.output
    assert ending.left == []


@pytest.mark.behaviour(46)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            STALLED,
            r"rank 1 \(stage 1 of replica 0\) waits for no other rank: for \d+\.\d s it has been in the forward of ",
        ),
        (
            DATA_STALLS,
            r"rank 0 \(stage 0 of replica 0\) waits for no other rank: for \d+\.\d s it has been in the data l",
        ),
    ],
)
def test_a_stall_is_reported_with_the_place_of_every_rank(endings, case, words):
    ending = endings[case]
    assert ending.statuses == [1, 1], ending.output
    assert PATIENCE_S < ending.seconds < PATIENCE_S + LIMIT_S
    assert any(re.search(words, line) for line in last_lines(ending.output)), ending.output
    assert len(re.findall(r"^   [01]      [01] +\d+\.\d  \w+", ending.output, re.MULTILINE)) in (2, 4), ending.output


@pytest.mark.behaviour(46)
def test_a_rank_that_holds_the_interpreter_is_neither_dead_nor_stalled(endings):
    assert endings[HOLDING].statuses == [0, 0], endings[HOLDING].output
    assert endings[HOLDING].seconds > HOLDING_S


@pytest.mark.behaviour(46)
def test_the_first_nan_ends_all_ranks_by_name(endings):
    ending = endings[NAN]
    assert ending.statuses == [1, 1], ending.output
    assert ending.seconds < LIMIT_S
    place = "rank 1 (stage 1 of replica 0, in the forward of microbatch 0, chunk 0)"
    assert_last(ending, f"the output of {place} is NaN or infinite, and was the first to be")


@pytest.mark.behaviour(46)
def test_want_of_memory_comes_with_advice(endings):
    ending = endings[MEMORY]
    assert ending.statuses == [1, 1], ending.output
    assert "stage 1 has no memory left on cpu. It helps to cut rows into more chunks (num_chunks)" in ending.output
    assert "rank 1 (stage 1 of replica 0, in the forward of microbatch 0, chunk 0) failed first" in ending.output


# ---- saving on an exception ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saving_endings(tmp_path_factory):
    """The endings of `SAVING`, and what is in the folder for checkpoints."""
    folders = {case: tmp_path_factory.mktemp("saving") for case in SAVING}

    def run(case):
        place, rank = case
        signalled = Signal(str(folders[case]), rank=rank, place=place)
        ending = run_to_the_end(train_and_save, 2, folders[case] / "output", signalled)
        return ending, sorted(each.name for each in folders[case].glob("*.ckpt"))

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(SAVING, pool.map(run, SAVING), strict=True))


@pytest.mark.behaviour(47)
@pytest.mark.parametrize("case", SAVING)
def test_saving_on_an_exception_of_one_rank_never_hangs_nor_hides_it(saving_endings, case):
    (ending, checkpoints), (_, rank) = saving_endings[case], case
    assert ending.statuses == [1, 1], ending.output
    assert ending.seconds < LIMIT_S
    assert_last(ending, MESSAGE)
    assert f"rank {rank} saves no checkpoint on this exception" in ending.output
    assert checkpoints == [], "a checkpoint of one rank alone, or a link to none"


@pytest.mark.behaviour(47)
def test_one_device_saves_on_an_exception_in_a_step(tmp_path):
    signalled = Signal(str(tmp_path), place="forward", devices=1)
    ending = run_to_the_end(train_and_save, 1, tmp_path / "output", signalled)
    assert_last(ending, MESSAGE)
    assert (tmp_path / "saved.ckpt").is_file()


@pytest.fixture(scope="module")
def script_endings(tmp_path_factory):
    """Status, seconds since the failure, and output of each of `SCRIPTS`."""
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}

    def run(case):
        place, rank = case
        command = [sys.executable, ROOT / "tests" / "support" / "failing.py", place, str(rank), "2"]
        # The pipe that the command's output comes through is closed when the last of its processes has ended.
        finished = run_command(command, tmp_path_factory.mktemp("script"), **environment)
        return finished.status, seconds_since_failure(finished.output), finished.output

    with ThreadPoolExecutor() as pool:
        return dict(zip(SCRIPTS, pool.map(run, SCRIPTS), strict=True))


@pytest.mark.behaviour(46)
@pytest.mark.parametrize("case", SCRIPTS)
def test_a_script_that_starts_its_processes_itself_ends_with_the_users_error(script_endings, case):
    status, seconds, output = script_endings[case]
    assert status != 0
    assert seconds < LIMIT_S
    assert any(MESSAGE in line for line in last_lines(output)), output


# ---- the board itself ----------------------------------------------------------------------------------------------


@pytest.fixture
def boards():
    """The boards of two ranks, here in one process, during a run."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    guest = dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    with ThreadPoolExecutor() as pool:  # each waits for the other
        both = list(pool.map(FailureBoard, (host, guest), (0, 1), (2, 2)))
    for board in both:
        board.open()
    yield both
    for board in both:
        board.leave()


def raised(exception):
    """The exception, with a traceback."""
    try:
        raise exception
    except type(exception) as caught:
        return caught


def as_printed(exception):
    return "".join(traceback.format_exception(exception))


def test_a_consequence_is_completed_with_its_cause(boards):
    cause, consequence = raised(UsersError(7, MESSAGE)), raised(RuntimeError("Connection closed by peer"))
    before = as_printed(cause)
    boards[1].report(cause, "stage 1")
    boards[0].report(consequence, "stage 0")
    assert as_printed(cause) == f"{before}raised on rank 1 (stage 1)\n"
    assert consequence.args == ("Connection closed by peer",)
    printed = as_printed(consequence)
    assert printed.startswith("Traceback")
    assert "rank 1 (stage 1) failed first" in printed
    assert printed.rstrip().endswith(before.rstrip())


def test_one_error_on_all_ranks_is_told_once(boards):
    errors = [raised(ValueError("more stages than layers")) for _ in boards]
    for board, error in zip(boards, errors, strict=True):
        board.report(error, "setup")
    assert all("failed first" not in as_printed(error) for error in errors)


def test_a_run_knows_nothing_of_the_failure_of_an_earlier_one(boards):
    for board in boards:
        board.report(raised(ValueError("in the first run")), "setup")
        board.open()
    later = raised(RuntimeError("in the second run"))
    boards[1].report(later, "stage 1")
    assert "first run" not in as_printed(later)


def test_nothing_is_reported_between_runs(boards):
    for board in boards:
        board.close()
    error = raised(ValueError("in the user's own program"))
    before = as_printed(error)
    boards[0].report(error, "stage 0")
    assert as_printed(error) == before
