"""`lightning-seq1f1b profile`: what it measures, what it writes, and what it refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_config
from transformers import AutoConfig

from lightning_seq1f1b.cli import profile as command
from lightning_seq1f1b.cli.main import main
from lightning_seq1f1b.cli.measuring import PARTS, Measurement, Measuring, row_of
from lightning_seq1f1b.cli.sample_model import NUM_LAYERS, sample_config, sample_model
from lightning_seq1f1b.models.shape import model_shape
from lightning_seq1f1b.schedule.costs import attended_pairs
from lightning_seq1f1b.schedule.profile import PASSES, Profile
from lightning_seq1f1b.schedule.spans import spans


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_config("llama", num_hidden_layers=6).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def run(model: Path, output: Path, *options: str) -> int:
    return main(["profile", "--model", str(model), "--output", str(output), "--device", "cpu", *options])


def test_writes_a_profile_of_the_model_that_plan_takes(capsys, model, tmp_path):
    began = time.monotonic()
    assert run(model, tmp_path / "profile.json", "--chunks", "32,64,128") == 0
    assert time.monotonic() - began < 60
    said = capsys.readouterr().out
    profile = Profile.from_json((tmp_path / "profile.json").read_text(), model_shape(AutoConfig.from_pretrained(model)))
    assert (profile.rows, profile.dtype) == (1, "float32")
    assert profile.device.startswith("cpu")
    for part in ("layer", "embedding", "head"):
        fits = getattr(profile, part)
        assert list(fits) == list(PASSES)
        for name, fit in fits.items():
            assert min(fit.pairs, fit.tokens, fit.constant) >= 0
            assert part == "layer" or fit.pairs == 0
            (line,) = (line for line in said.splitlines() if line.split()[:2] == [part, name])
            assert line.endswith("%")
    span = 64
    for name in PASSES:
        assert profile.layer[name](span * span / 2, span) > 0
    assert "chunks of 32, 64, 128 tokens behind up to 416" in said
    options = ["--seq-len", "1024", "--devices", "2", "--profile", str(tmp_path / "profile.json"), "--json"]
    assert main(["plan", "--model", str(model), *options]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["step_seconds"] > 0


def test_measures_all_passes_of_all_parts_in_this_process(model):
    config, _ = sample_config(AutoConfig.from_pretrained(model))
    measuring = Measuring(sample_model(config, torch.float32, torch.device("cpu")), config.vocab_size, rows=2)
    measurement = measuring.shortest([32, 16], 0.0, lambda done, total: None)
    assert measurement.rounds == 2
    assert set(measurement.times) == {
        (part, name, chunk) for part in range(len(PARTS)) for name in PASSES for chunk in range(2)
    }
    assert min(measurement.times.values()) > 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma3_text", "qwen2_moe"])
def test_a_sample_has_layers_like_the_models(family):
    config = tiny_config(family)
    whole = model_shape(config)
    sample, index = sample_config(config)
    few = model_shape(sample)
    assert few.num_layers == NUM_LAYERS
    assert config.num_hidden_layers == whole.num_layers
    assert {few.layer(layer) for layer in range(NUM_LAYERS)} == {whole.layer(index)}
    assert (few.vocab_size, few.hidden_size) == (whole.vocab_size, whole.hidden_size)
    measuring = Measuring(sample_model(sample, torch.float32, torch.device("cpu")), 90, rows=1)
    assert len(measuring.once([8, 8])) == len(PARTS) * len(PASSES) * 2


def test_laws_are_found_in_made_up_times(model):
    """A layer with one law, an embedding and a head with more tokens and constant on top."""
    chunks = spans(row_of([32, 64, 128, 256]))
    times = {}
    for stage, (tokens, constant) in enumerate([(1e-7, 2e-6), (0.0, 0.0), (5e-7, 1e-6)]):
        for place, name in enumerate(PASSES, 1):
            for chunk, span in enumerate(chunks):
                pairs = attended_pairs(span.start, span.stop)
                layer = place * (1e-9 * pairs + 1e-6 * span.length + 1e-5)
                times[stage, name, chunk] = layer + tokens * span.length + constant
    shape = model_shape(AutoConfig.from_pretrained(model))
    profile, errors = command.fitted(shape, 0, Measurement(chunks, times, 3), 2, "float32", "a machine")
    for place, name in enumerate(PASSES, 1):
        layer = profile.layer[name]
        assert (layer.pairs, layer.tokens, layer.constant) == pytest.approx((place * 1e-9, place * 1e-6, place * 1e-5))
        assert profile.embedding[name].tokens == pytest.approx(1e-7)
        assert profile.embedding[name].constant == pytest.approx(2e-6)
        assert profile.head[name].tokens == pytest.approx(5e-7)
        assert profile.head[name].constant == pytest.approx(1e-6)
    assert max(errors.values()) < 1e-6
    assert (profile.rows, profile.device) == (2, "a machine")


def test_chunks_are_chosen_so_that_a_round_takes_no_longer_than_asked(model):
    config, _ = sample_config(AutoConfig.from_pretrained(model))
    measuring = Measuring(sample_model(config, torch.float32, torch.device("cpu")), config.vocab_size, rows=1)
    least = list(measuring.affordable(0.0))
    most = list(measuring.affordable(1e9))
    assert least == [16, 32, 64]
    assert most == [256, 512, 1024, 2048]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dtype", "float8"), "unknown --dtype 'float8'"),
        (("--rows", "0"), "--rows must be at least 1, not 0"),
        (("--chunks", "8,0"), "--chunks are lengths in tokens and must be at least 1, not 0"),
        (("--device", "nowhere"), "--device nowhere cannot be used here"),
    ],
)
def test_bad_input_ends_with_one_sentence(capsys, model, tmp_path, options, words):
    assert run(model, tmp_path / "profile.json", *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "profile.json").exists()


def test_lengths_that_are_no_numbers(capsys, model, tmp_path):
    with pytest.raises(SystemExit):
        run(model, tmp_path / "profile.json", "--chunks", "8,x")
    assert "argument --chunks: write lengths in tokens, like 256,512, not '8,x'" in capsys.readouterr().err


def test_a_directory_that_does_not_exist(capsys, model, tmp_path):
    assert run(model, tmp_path / "no" / "profile.json") == 2
    assert "does not exist" in capsys.readouterr().err
