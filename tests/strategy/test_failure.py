"""Whatever happens on one rank ends all of them soon, and the user's own error is what is printed last."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.commands import ROOT, run_command
from support.endings import run_to_the_end, seconds_since_failure
from support.failing import MESSAGE, main

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
    assert ending.statuses == [-9, 1, 1]
    assert ending.seconds < LIMIT_S
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
