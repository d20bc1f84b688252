"""Two machines, stood in for by network namespaces or addresses of one, train like one device; and restarts go on."""

from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import launched, restarted
from support.commands import ROOT, succeed
from support.endings import captured
from support.fitting import ONE_DEVICE, fit, rows
from support.nodes import two_nodes
from support.processes import free_port, run_processes
from support.resuming import load
from support.training import FineTune, Recorder

ENVIRONMENT = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PROGRAMS = ROOT / "tests" / "support"


@pytest.fixture(scope="module")
def losses():
    recorder = Recorder()
    fit(ONE_DEVICE, FineTune(), rows(), callbacks=[recorder], max_epochs=1)
    return recorder.losses


@pytest.fixture(scope="module")
def nodes():
    with two_nodes() as both:
        yield both


def assert_all_ended(output, world_size, losses):
    ended = [json.loads(line.partition("ended ")[2]) for line in output.splitlines() if line.startswith("ended ")]
    assert sorted(each["rank"] for each in ended) == list(range(world_size)), output
    for each in ended:
        torch.testing.assert_close(each["losses"], losses, rtol=0, atol=5e-6)


@pytest.mark.behaviour(42)
def test_torchrun_on_two_nodes(tmp_path, nodes, losses):
    port = free_port()

    def run(index):
        where = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={index}"]
        where += [f"--master-addr={nodes[0].address}", f"--master-port={port}"]
        folder = tmp_path / str(index)
        folder.mkdir()
        command = [*nodes[index].prefix, *TORCHRUN, *where, PROGRAMS / "launched.py", "1", "2"]
        return succeed(command, folder, **nodes[index].environment, **ENVIRONMENT)

    with ThreadPoolExecutor() as both:
        assert_all_ended("".join(both.map(run, range(2))), 2, losses)


def slurm_task(rank, nodes, folder):
    """For `run_processes`: one of two tasks on one of two nodes, as srun starts them."""
    node = rank // 2
    nodes[node].enter()
    for name in ("MASTER_ADDR", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK", "RANK"):
        del os.environ[name]
    job = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}
    task = {"SLURM_NODEID": str(node), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)}
    os.environ.update({**job, **task, "SLURM_NODELIST": ",".join(each.address for each in nodes)})
    os.chdir(folder)
    return captured(launched.main, 2, 2)


@pytest.mark.behaviour(42)
def test_slurm_on_two_nodes_of_two_devices(tmp_path, nodes, losses):
    output = "".join(run_processes(slurm_task, 4, nodes, tmp_path, timeout_s=120.0))
    assert_all_ended(output, 4, losses)


@pytest.mark.behaviour(42)
def test_torchrun_restarts_all_when_one_is_killed_and_training_goes_on(tmp_path):
    """The weights in the end are those of a run that nothing interrupted, on one device."""
    there, truth = tmp_path / "there", tmp_path / "truth"
    command = [
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=2",
        PROGRAMS / "restarted.py",
        there,
        "1",
    ]
    output = succeed(command, tmp_path, **ENVIRONMENT)
    run_processes(uninterrupted, 1, str(truth))
    starts = re.findall(r"rank (\d) starts at step (\d+)", output)
    assert sorted(starts) == [("0", "0"), ("0", "4"), ("1", "0"), ("1", "4")], output
    got, expected = (load(folder / restarted.LAST) for folder in (there, truth))
    assert got["global_step"] == expected["global_step"] == 8
    torch.testing.assert_close(got["state_dict"], expected["state_dict"], rtol=0, atol=1e-9)


def uninterrupted(rank, folder):
    """For `run_processes`."""
    restarted.main(folder, devices=1, strategy="auto")
