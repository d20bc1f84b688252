"""`lightning-seq1f1b plan`: what it prints, that its configuration is one, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from support.tiny_models import tiny_config

from lightning_seq1f1b import Seq1F1BStrategy
from lightning_seq1f1b.cli import planning
from lightning_seq1f1b.cli.main import main
from lightning_seq1f1b.models.shape import model_shape
from lightning_seq1f1b.schedule.estimate import MACHINES
from lightning_seq1f1b.schedule.profile import PASSES, Fit, Profile
from lightning_seq1f1b.strategy import as_asked

SMALL = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 65536,
}
OPTIONS = "--seq-len 8192 --devices 4"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the configuration of a small Llama, and no weights."""
    tiny_config("llama", **SMALL).save_pretrained(tmp_path / "small")
    return tmp_path / "small"


def profile_of(model: Path, **changes) -> Profile:
    from transformers import AutoConfig

    fits = {name: Fit(1e-9, 1e-6, 1e-4) for name in PASSES}
    none = {name: Fit(0.0, 0.0, 0.0) for name in PASSES}
    about = {"rows": 1, "dtype": "float32", "device": "cpu (x86_64, 1 thread)", **changes}
    shape = model_shape(AutoConfig.from_pretrained(model))
    return Profile(shape=shape, layer=fits, embedding=none, head=none, **about)


def output(capsys: pytest.CaptureFixture[str], model: Path, options: str = OPTIONS) -> str:
    assert main(["plan", "--model", str(model), *shlex.split(options)]) == 0
    return capsys.readouterr().out


def numbers(capsys: pytest.CaptureFixture[str], model: Path, options: str = OPTIONS) -> dict:
    return json.loads(output(capsys, model, f"{options} --json"))


def test_a_ranking_the_reasons_the_memory_and_the_configuration(capsys, model):
    text = output(capsys, model, f"{OPTIONS} --top 3")
    lines = text.splitlines()
    assert (
        "8 layers, 4 rows of 8192 tokens in 4 microbatches, 4 ranks, h100 by its vendor's figures (not measured), "
        in lines[0]
    )
    assert lines[0].endswith("bf16-true")
    assert "75.2 GiB a rank are planned with" in lines[1]
    (head,) = (place for place, line in enumerate(lines) if line.split()[:1] == ["schedule"])
    assert [line.split()[0] for line in lines[head + 1 : head + 4]] == ["1", "2", "3"]
    assert lines[head + 4] == ""
    assert any(line.startswith("- Split backward") for line in lines)
    (table,) = (place for place, line in enumerate(lines) if line.startswith("rank"))
    assert lines[table].split("  ")[0] == "rank"
    for part in ("weights", "gradients", "optimizer", "activations", "keys, values", "logits", "buffers", "total"):
        assert part in lines[table]
    assert [line.split()[0] for line in lines[table + 1 : table + 5]] == ["0", "1", "2", "3"]
    assert max(map(len, lines)) <= 120 + len(str(model))
    assert yaml.safe_load(text[text.index("trainer:") :])["trainer"]["devices"] == 4


def test_numbers_for_programs(capsys, model):
    found = numbers(capsys, model, f"{OPTIONS} --memory 40GB --batch-size 6 --top 100000")
    assert (found["num_ranks"], found["num_microbatches"], found["rows_per_microbatch"]) == (4, 6, 1)
    assert found["sequence_length"] == 8192
    assert found["memory_limit"] == pytest.approx(40e9 * 0.94)
    assert len(found["memory"]) == 4
    assert found["why"][0].startswith(found["plans"][0]["schedule"])
    best = found["plans"][0]
    assert best["exact"] is True
    assert [rank["total"] for rank in found["memory"]] == pytest.approx(best["peak_bytes"])
    for plan in found["plans"]:
        assert sum(plan["chunk_lengths"]) == 8192
        assert len(plan["chunk_lengths"]) == plan["num_chunks"]
        assert sum(plan["layers"]) == 8
        assert len(plan["layers"]) == 4 * plan["virtual_stages"]
        assert plan["tokens_per_second"] == pytest.approx(6 * 8192 / plan["step_seconds"])
        assert 0 <= plan["bubble"] <= plan["idle"] < 1
        assert 0 < plan["mfu"] < 1
        assert max(plan["peak_bytes"]) <= found["memory_limit"]
        # Those that are almost as fast may be more complicated than the first.
        assert plan["step_seconds"] >= best["step_seconds"] * 0.995


def test_the_table_shows_other_schedules_and_every_setting_once(capsys, model):
    lines = output(capsys, model).splitlines()
    (head,) = (place for place, line in enumerate(lines) if line.split()[:1] == ["schedule"])
    rows = [line.split() for line in lines[head + 1 : lines.index("", head)]]
    assert len(rows) == 10
    assert len({tuple(row[1:5]) + tuple(row[5:-5]) for row in rows}) == 10
    plans = numbers(capsys, model)["plans"]
    assert {row[1] for row in rows} == {plan["schedule"] for plan in plans}
    assert len(plans) > 10


def test_every_run_prints_the_same(capsys, model):
    assert numbers(capsys, model) == numbers(capsys, model)


def test_the_configuration_is_what_the_training_commands_read(capsys, model, tmp_path, monkeypatch):
    """For every schedule: the parser of `fit` takes the file, and the strategy takes its arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-seq1f1b"])
    for schedule in (
        "",
        "1f1b",
        "gpipe",
        "interleaved_1f1b",
        "zb1p",
        "seq1f1b",
        "seq1f1b_zb",
        "interleaved_seq1f1b_zb",
    ):
        fixed = f"--schedule {schedule}" if schedule else "--partition 0.5"
        text = output(capsys, model, f"--seq-len 4096 --devices 2 --machine cpu {fixed} --config-only")
        config = yaml.safe_load(text)
        config["data"].update(files=["*.txt"], tokenizer="somewhere")
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(config))
        with pytest.raises(SystemExit) as exit_:
            main(["fit", "--config", "plan.yaml", "--print_config"])
        assert exit_.value.code == 0
        read = yaml.safe_load(capsys.readouterr().out)
        assert read["trainer"]["devices"] == 2
        assert read["trainer"]["accelerator"] == "cpu"
        assert read["trainer"]["precision"] == "32-true"
        assert read["model"]["init_args"]["model_name_or_path"] == str(model)
        assert read["data"]["init_args"]["sequence_length"] == 4096
        arguments = config["trainer"]["strategy"]["init_args"]
        assert arguments.items() <= read["trainer"]["strategy"]["init_args"].items()
        assert arguments["schedule"] == schedule or not schedule
        Seq1F1BStrategy(**arguments)


def test_only_what_is_not_fixed_is_chosen(capsys, model):
    fixed = "--schedule seq1f1b_zb --chunks 4 --memory-knob 2 --partition even"
    (plan,) = {
        json.dumps({name: plan[name] for name in ("schedule", "num_chunks", "memory_knob", "partition")})
        for plan in numbers(capsys, model, f"{OPTIONS} {fixed}")["plans"]
    }
    assert json.loads(plan) == {"schedule": "seq1f1b_zb", "num_chunks": 4, "memory_knob": 2, "partition": 0.0}
    listed = numbers(capsys, model, f"{OPTIONS} --schedule seq1f1b --partition 4096,2048,2048")["plans"][0]
    assert listed["chunk_lengths"] == [4096, 2048, 2048]
    assert numbers(capsys, model, f"{OPTIONS} --virtual-stages 2")["plans"][0]["virtual_stages"] == 2


def test_rows_that_share_a_microbatch(capsys, model):
    found = numbers(capsys, model, f"{OPTIONS} --batch-size 8 --microbatches 4")
    assert (found["num_microbatches"], found["rows_per_microbatch"]) == (4, 2)
    one_each = numbers(capsys, model, f"{OPTIONS} --microbatches 6")
    assert (one_each["num_microbatches"], one_each["rows_per_microbatch"]) == (6, 1)
    assert found["plans"][0]["tokens_per_second"] == pytest.approx(8 * 8192 / found["plans"][0]["step_seconds"])
    assert found["config"]["trainer"]["strategy"]["init_args"]["num_microbatches"] == 4
    assert found["config"]["data"]["batch_size"] == 8


def test_memory_that_is_too_small_names_the_least_and_that_suffices(capsys, model):
    error = refusal(capsys, model, f"{OPTIONS} --memory 100MiB")
    assert "no setting fits into 94 MiB a rank: the smallest needs" in error
    assert "seq1f1b" in error
    assert "with --recompute the same setting needs" in error
    assert "with --recompute --lora 16 the same setting needs" in error
    enough = error.rpartition("--memory ")[2].partition(";")[0]
    found = numbers(capsys, model, f"{OPTIONS} --memory {enough}")
    assert found["plans"]


def test_a_profile_takes_the_place_of_the_machine(capsys, model, tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(profile_of(model).to_json())
    text = output(capsys, model, f"{OPTIONS} --profile {file}")
    assert "as measured on cpu (x86_64, 1 thread), 32-true" in text
    found = numbers(capsys, model, f"{OPTIONS} --profile {file} --schedule 1f1b --batch-size 1")["plans"][0]
    # All 8 layers one after the other: three passes of the same law over one row, and a message to and fro between
    # each of 4 ranks, with nothing in parallel.
    computing = 8 * 3 * (1e-9 * 8192**2 / 2 + 1e-6 * 8192 + 1e-4)
    message = MACHINES["cpu"].latency + 8192 * 512 * 4 / MACHINES["cpu"].bandwidth
    assert found["step_seconds"] == pytest.approx(computing + 6 * message)
    assert found["mfu"] is None


def test_adapters_and_recomputation(capsys, model):
    full = numbers(capsys, model, f"{OPTIONS} --schedule seq1f1b --chunks 4 --partition even")
    adapters = numbers(capsys, model, f"{OPTIONS} --schedule seq1f1b --chunks 4 --partition even --lora 8")
    again = numbers(capsys, model, f"{OPTIONS} --schedule seq1f1b --chunks 4 --partition even --recompute")
    assert adapters["memory"][0]["optimizer"] < 0.05 * full["memory"][0]["optimizer"]
    assert adapters["memory"][0]["weights"] == full["memory"][0]["weights"]
    assert adapters["plans"][0]["step_seconds"] < 0.95 * full["plans"][0]["step_seconds"]
    assert again["memory"][0]["activations"] < 0.3 * full["memory"][0]["activations"]
    assert again["plans"][0]["step_seconds"] > 1.2 * full["plans"][0]["step_seconds"]
    assert again["config"]["model"] == {"model_name_or_path": str(model), "recompute": True}


@pytest.mark.parametrize(
    ("precision", "weights", "optimizer"),
    [("bf16-true", 2, 4), ("16-mixed", 6, 8), ("bf16-mixed", 6, 8), ("32-true", 4, 8), ("64-true", 8, 16)],
)
def test_bytes_of_a_precision(capsys, model, precision, weights, optimizer):
    fixed = "--schedule 1f1b --seq-len 1024 --devices 1"
    found = numbers(capsys, model, f"{fixed} --precision {precision}")
    rank = found["memory"][0]
    layer = 512 * (2 * 512 + 2 * 128) + 3 * 512 * 2048
    parameters = 8 * layer + 2 * 4096 * 512
    assert rank["weights"] == pytest.approx(weights * parameters, rel=0.01)
    assert rank["optimizer"] == pytest.approx(optimizer * parameters, rel=0.01)
    assert found["config"]["trainer"]["precision"] == precision


def refusal(capsys: pytest.CaptureFixture[str], model: Path | str, options: str) -> str:
    try:
        status = main(["plan", "--model", str(model), *shlex.split(options)])
    except SystemExit as exit_:
        status = exit_.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (f"{OPTIONS} --schedule seq1f", "unknown schedule 'seq1f', .* did you mean 'seq1f1b'?"),
        (f"{OPTIONS} --machine h10", "unknown --machine 'h10', .* did you mean 'h100'?"),
        (f"{OPTIONS} --precision bf16", "unknown --precision 'bf16'"),
        (f"{OPTIONS} --memory much", "'much' is no size of memory; write it like 80GiB"),
        (f"{OPTIONS} --memory 0GiB", "'0GiB' is no size of memory"),
        (f"{OPTIONS} --virtual-stages 3", "--virtual-stages 3 on 4 ranks makes 12 stages, .* to 2 or less"),
        (f"{OPTIONS} --schedule 1f1b --chunks 2", "no schedule fits --schedule 1f1b, --chunks 2 with"),
        (f"{OPTIONS} --memory-knob 0", "--memory-knob must be at least 1, not 0"),
        (f"{OPTIONS} --memory-knob 2 --schedule gpipe", "--memory-knob 2 has no effect on gpipe"),
        (f"{OPTIONS} --chunks 0", "--chunks must be at least 1, not 0"),
        (f"{OPTIONS} --batch-size 2 --microbatches 4", "--batch-size 2 does not divide into --microbatches 4"),
        (f"{OPTIONS} --batch-size 3 --microbatches 2", "--batch-size 3 does not divide into --microbatches 2"),
        (f"{OPTIONS} --lora 0", "--lora is the rank of the adapters and must be at least 1"),
        (f"{OPTIONS} --trainable-share 1.5", "--trainable-share must be between 0 and 1, not 1.5"),
        (f"{OPTIONS} --batch-size 0", "--batch-size must be at least 1, not 0"),
        (f"{OPTIONS} --partition 1000,1000", "add up to 2000 tokens, but the rows have 8192; .* --partition balanced"),
        (f"{OPTIONS} --partition 1.5", "--partition: write even, balanced, .* not '1.5'"),
        (f"{OPTIONS} --partition 1,x", "--partition: write even, balanced, .* not '1,x'"),
        ("--seq-len 8192 --devices 9", "8 layers cannot fill 9 ranks"),
        ("--seq-len 0 --devices 2", "--seq-len must be at least 1, not 0"),
        ("--seq-len 8192", "the following arguments are required: --devices"),
        (f"{OPTIONS} --profile nowhere.json", "the profile nowhere.json cannot be read: No such file or directory"),
    ],
)
def test_bad_input_ends_with_one_sentence(capsys, model, options, words):
    error = refusal(capsys, model, options)
    assert all(part in error for part in words.split(".*")), error


def test_files_that_are_no_model_or_profile(capsys, model, tmp_path):
    assert "neither a directory nor a config.json here, nor in the local cache" in refusal(
        capsys, "no/such-model", OPTIONS
    )
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(capsys, tmp_path / "empty", OPTIONS)
    (tmp_path / "foreign.json").write_text('{"model_type": "no_such_type"}')
    assert "no configuration that transformers can read" in refusal(capsys, tmp_path / "foreign.json", OPTIONS)
    foreign = refusal(capsys, model, f"{OPTIONS} --profile {tmp_path / 'foreign.json'}")
    assert "not a profile that `lightning-seq1f1b profile` wrote: its format is not lightning_seq1f1b" in foreign
    tiny_config("llama").save_pretrained(tmp_path / "other")
    (tmp_path / "other.json").write_text(profile_of(tmp_path / "other").to_json())
    assert "the profile is of another model" in refusal(capsys, model, f"{OPTIONS} --profile {tmp_path / 'other.json'}")
    (tmp_path / "half.json").write_text(profile_of(model, dtype="bfloat16").to_json())
    assert "was measured in bfloat16, but --precision computes in float32" in refusal(
        capsys, model, f"{OPTIONS} --profile {tmp_path / 'half.json'} --precision 32-true"
    )


def test_chunk_multiples_are_those_of_the_strategy():
    assert planning.CHUNK_MULTIPLE["cpu"] == as_asked.CPU_CHUNK_MULTIPLE
    assert planning.GPU_CHUNK_MULTIPLE == as_asked.GPU_CHUNK_MULTIPLE


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("80GB", 80e9), ("1.5 TiB", 1.5 * 2**40), ("512mib", 2**29), ("1000", 1000), ("3k", 3000)],
)
def test_sizes_of_memory(text, size):
    assert planning.bytes_of(text) == size


def test_no_gpu_no_processes_and_no_network(model):
    import subprocess
    import sys

    program = f"""
import socket, sys
def refuse(*args, **kwargs): raise AssertionError("network")
socket.socket.connect = refuse
sys.modules["lightning"] = None
from lightning_seq1f1b.cli.main import main
assert main(["plan", "--model", {str(model)!r}, "--seq-len", "4096", "--devices", "2", "--config-only"]) == 0
import torch
assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert yaml.safe_load(run.stdout)["trainer"]["devices"] == 2
