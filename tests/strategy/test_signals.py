"""Signals are honoured between batches: on all ranks together, with one save, whichever rank they have reached."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
import torch
from support.commands import ROOT, run_command
from support.endings import run_to_the_end
from support.left_behind import marked, new_mark
from support.signalled import BATCH, BATCHES, Signal, main

LIMIT_S = 20
CASES = {
    "SIGTERM to one rank": Signal("", signal.SIGTERM, rank=1),
    "SIGINT to one rank": Signal("", signal.SIGINT, rank=1),
    "SIGINT in validation": Signal("", signal.SIGINT, rank=0, place="validation"),
    "requeue to one rank": Signal("", signal.SIGUSR1, rank=1, slurm=True),
    "SIGINT in a step that hangs": Signal("", signal.SIGINT, rank=0, place="hang"),
}
SCRIPT = "SIGINT to a script and its children"


def run(name, folder):
    if name == SCRIPT:
        case = Signal(str(folder), signal.SIGINT, rank=None)
        command = [sys.executable, ROOT / "tests" / "support" / "signalled.py", json.dumps(asdict(case))]
        return run_command(command, folder, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    return run_to_the_end(main, 2, folder / "output", replace(CASES[name], folder=str(folder)))


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """How each case ends, and its folder; all of them run side by side. Then what processes are left."""
    mark = new_mark()
    folders = {name: tmp_path_factory.mktemp("signal") for name in (*CASES, SCRIPT)}
    with ThreadPoolExecutor() as pool:
        ended = dict(zip(folders, pool.map(run, folders, folders.values()), strict=True))
    return {name: (ended[name], folders[name]) for name in folders}, marked(mark)


def reports(folder):
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def saved_step(path):
    return torch.load(path, weights_only=True)["global_step"]


def stopped_step(folder, ended):
    """The step after which both ranks stopped: soon, and with one save."""
    first, second = reports(folder)
    step = first["step"]
    assert first == second == {"ended": ended, "step": step, "saves": [step]}
    assert BATCH < step < BATCHES
    assert saved_step(folder / "saved.ckpt") == step
    return step


@pytest.mark.behaviour(48)
@pytest.mark.parametrize("name", ["SIGTERM to one rank", "SIGINT to one rank"])
def test_all_ranks_stop_after_the_batch_with_one_save(endings, name):
    ending, folder = endings[0][name]
    stopped_step(folder, "SIGTERMException" if "TERM" in name else "SystemExit")
    assert ending.seconds < LIMIT_S
    assert ending.left == []


@pytest.mark.behaviour(48)
def test_a_signal_in_validation_stops_it_before_its_next_batch(endings):
    ending, folder = endings[0]["SIGINT in validation"]
    stopped = {"ended": "SystemExit", "step": BATCHES, "saves": [BATCHES]}
    assert reports(folder) == [stopped] * 2, ending.output


@pytest.mark.behaviour(48)
def test_a_requeue_saves_once_asks_once_and_goes_on(endings):
    ending, folder = endings[0]["requeue to one rank"]
    first, second = reports(folder)
    requeued = first["saves"][0]  # there is one more at the end of any training
    assert first == second == {"ended": "trained to the end", "step": BATCHES, "saves": [requeued, BATCHES]}
    assert BATCH < requeued < BATCHES
    assert saved_step(folder / "hpc_ckpt_1.ckpt") == requeued
    assert (folder / "requeued").read_text() == "requeue 42\n"
    assert ending.statuses == [0, 0]


@pytest.mark.behaviour(49)
def test_an_interrupt_leaves_no_child_and_one_save(endings):
    (finished, folder), left = endings[0][SCRIPT], endings[1]
    assert finished.status == 1, finished.output
    report = json.loads((folder / "rank-0.json").read_text())
    assert report == {"ended": "SystemExit", "step": report["step"], "saves": [report["step"]]}
    assert BATCH < report["step"] < BATCHES
    assert saved_step(folder / "saved.ckpt") == report["step"]
    assert left == {}


@pytest.mark.behaviour(49)
def test_a_second_interrupt_ends_a_step_that_hangs_at_once(endings):
    ending, folder = endings[0]["SIGINT in a step that hangs"]
    assert ending.statuses == [128 + signal.SIGINT, 1], ending.output
    assert ending.seconds < LIMIT_S
    assert "rank 0 (stage 0 of replica 0) was interrupted for a second time" in ending.output
    assert not (folder / "saved.ckpt").exists()
