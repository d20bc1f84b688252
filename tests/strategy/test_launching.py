"""Every way to start processes trains like one device and ends cleanly on all of them."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from support.commands import ROOT, succeed
from support.fitting import ONE_DEVICE, fit, rows
from support.processes import free_port
from support.training import QUIET, FineTune, Recorder

from lightning_seq1f1b import Seq1F1BStrategy

PROGRAM = ROOT / "tests" / "support" / "launched.py"
ENVIRONMENT = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


@pytest.fixture(scope="module")
def losses():
    recorder = Recorder()
    fit(ONE_DEVICE, FineTune(), rows(), callbacks=[recorder], max_epochs=1)
    return recorder.losses


def assert_both_ended(output, losses):
    """Both ranks have printed the losses of one device, and nothing sounds like a failure."""
    ended = [json.loads(line.partition("ended ")[2]) for line in output.splitlines() if line.startswith("ended ")]
    assert sorted(each["rank"] for each in ended) == [0, 1], output
    for each in ended:
        torch.testing.assert_close(each["losses"], losses, rtol=0, atol=5e-6)
    for alarm in ("Traceback", "Exception", "Forcefully"):
        assert alarm not in output, output


@pytest.mark.behaviour(42)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param([PROGRAM], id="script"),
        pytest.param(["-m", "support.launched"], id="module"),
        pytest.param(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", PROGRAM], id="torchrun"),
    ],
)
def test_one_command_starts_both_processes(tmp_path, losses, command):
    assert_both_ended(succeed([sys.executable, *command], tmp_path, **ENVIRONMENT), losses)


@pytest.mark.behaviour(42)
def test_slurm_starts_both_processes(tmp_path, losses):
    task = {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **ENVIRONMENT,
    }

    def run(rank):
        folder = tmp_path / str(rank)
        folder.mkdir()
        return succeed([sys.executable, PROGRAM], folder, SLURM_PROCID=rank, SLURM_LOCALID=rank, **task)

    with ThreadPoolExecutor() as both:
        assert_both_ended("".join(both.map(run, range(2))), losses)


@pytest.mark.behaviour(42)
def test_notebook_gives_lightnings_message():
    interactive = "lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE"
    message = "is not compatible with an interactive environment"
    with mock.patch(interactive, True), pytest.raises(MisconfigurationException, match=message):
        L.Trainer(**QUIET, devices=2, strategy=Seq1F1BStrategy())
