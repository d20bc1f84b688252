"""Whatever happens on one rank ends all of them soon, and the user's own error is what is printed last."""

import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from support.commands import ROOT, run_command
from support.endings import run_to_the_end, seconds_since_failure
from support.failing import MESSAGE, UsersError, main

from lightning_seq1f1b.strategy.failure import FailureBoard

WORLD_SIZE = 3
LIMIT_S = 20
PLACES = ("setup", "before a collective", "step", "forward", "backward", "data", "callback")

SLOW = [("step, others busy", 0), ("killed, others busy", 0)]
"""Places and ranks of failures that the other ranks, computing for long, do not notice by themselves."""

SCRIPTS = [("step", 0), ("step, others busy", 1)]
"""Of two ranks, started by the script itself: rank 0 is the parent of rank 1."""


def last_lines(output):
    """The last three lines that are not empty: the user's own, and one that the launcher may add."""
    return [line for line in output.splitlines() if line.strip()][-3:]


@pytest.mark.behaviour(46)
@pytest.mark.parametrize("rank", [0, WORLD_SIZE - 1])
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_on_one_rank_ends_all_and_is_printed_last(tmp_path, place, rank):
    ending = run_to_the_end(main, WORLD_SIZE, tmp_path / "output", place, rank, WORLD_SIZE)
    assert ending.statuses == [1] * WORLD_SIZE, ending.output
    assert ending.seconds < LIMIT_S
    assert any(MESSAGE in line for line in last_lines(ending.output)), ending.output
    assert ending.output.count(f"rank {rank} (stage {rank} of replica 0) failed first") == WORLD_SIZE - 1


@pytest.mark.behaviour(46)
@pytest.mark.parametrize("rank", [0, WORLD_SIZE - 1])
def test_a_killed_rank_takes_the_others_along(tmp_path, rank):
    ending = run_to_the_end(main, WORLD_SIZE, tmp_path / "output", "killed", rank, WORLD_SIZE)
    assert ending.statuses == [-9 if each == rank else 1 for each in range(WORLD_SIZE)], ending.output
    assert ending.seconds < LIMIT_S


@pytest.fixture(scope="module")
def slow_endings(tmp_path_factory):
    """The endings of `SLOW`, which wait side by side."""
    folder = tmp_path_factory.mktemp("slow")

    def run(case):
        return run_to_the_end(main, WORLD_SIZE, folder / str(SLOW.index(case)), *case, WORLD_SIZE)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(run, SLOW))


@pytest.mark.behaviour(46)
def test_busy_ranks_are_ended_with_the_error_of_the_rank_that_failed(slow_endings):
    ending, _ = slow_endings
    assert ending.statuses == [1] * WORLD_SIZE
    assert ending.seconds < LIMIT_S
    assert any(MESSAGE in line for line in last_lines(ending.output)), ending.output


@pytest.mark.behaviour(46)
def test_busy_ranks_are_ended_when_rank_0_was_killed(slow_endings):
    _, ending = slow_endings
    assert ending.statuses == [-9, 1, 1], ending.output
    assert ending.seconds < LIMIT_S, ending.output
    assert all("rank 0, which hosts the store" in line for line in last_lines(ending.output)[1:]), ending.output


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
    both = [FailureBoard(store, rank, 2) for rank, store in enumerate((host, guest))]
    for board in both:
        board.open()
    yield both
    for board in both:
        board.close()


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
    assert as_printed(cause) == before
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
