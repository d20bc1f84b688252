"""The ready module's way from a checkpoint in four files over two stages and back: the same weights, the same text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from support.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from support.processes import run_processes
from support.tiny_models import tiny_model
from support.training import QUIET
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_seq1f1b import CausalLM, LongDocuments, Seq1F1BStrategy
from lightning_seq1f1b.cli import export as command
from lightning_seq1f1b.cli.main import main


def train(rank: int, root: Path, rate: float, name: str) -> tuple[list[str], float]:
    """Two steps on two stages; the parameters that this rank had not read, and the loss."""
    data = LongDocuments(str(root / "*.txt"), str(root / "start"), sequence_length=48, batch_size=2)
    module = CausalLM(str(root / "start"), learning_rate=rate, weight_decay=0.0, decay="none")
    load = module.configure_model
    empty: list[str] = []

    def configure_model() -> None:
        load()
        empty.extend(name for name, parameter in module.model.named_parameters() if parameter.is_meta)

    module.configure_model = configure_model
    trainer = L.Trainer(**QUIET, devices=2, strategy=Seq1F1BStrategy(num_chunks=3), max_steps=2)
    trainer.fit(module, data)
    trainer.strategy.save_pretrained(root / name)
    trainer.save_checkpoint(root / f"{name}.ckpt")
    return empty, float(trainer.callback_metrics["train_loss"])


def both(rank: int, root: Path) -> list[tuple[list[str], float]]:
    return [train(rank, root, rate, name) for rate, name in ((0.0, "same"), (1e-2, "trained"))]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("big")
    model = tiny_model("llama", torch.float32, vocab_size=VOCAB_SIZE, tie_word_embeddings=True)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(root / "start", max_shard_size=int(size / 3.4))
    save_byte_tokenizer(root / "start")
    (root / "a.txt").write_text("a text to learn by heart, " * 40)
    return root


@pytest.fixture(scope="module")
def seen(root: Path) -> list[Any]:
    assert len(list((root / "start").glob("*.safetensors"))) == 4
    return run_processes(both, 2, root)


def text(path: Path) -> list[int]:
    """Twenty tokens, the likeliest one each time."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    start = AutoTokenizer.from_pretrained(path)("a text", return_tensors="pt")
    return model.generate(**start, do_sample=False, min_new_tokens=20, max_new_tokens=20)[0].tolist()


def test_each_rank_reads_half_of_the_layers(seen):
    for rank, ((empty, _), _) in enumerate(seen):
        layers = {int(found[1]) for name in empty if (found := re.search(r"layers\.(\d+)", name))}
        assert layers == ({2, 3} if rank == 0 else {0, 1})


def test_the_text_is_the_same_before_and_after(seen, root):
    assert text(root / "same") == text(root / "start")
    assert main(["export", "--checkpoint", str(root / "same.ckpt"), "--output", str(root / "exported")]) == 0
    assert text(root / "exported") == text(root / "start")


def test_saved_and_exported_models_are_the_trained_one(seen, root):
    saved = AutoModelForCausalLM.from_pretrained(root / "trained").state_dict()
    before = AutoModelForCausalLM.from_pretrained(root / "start").state_dict()
    checkpoint = torch.load(root / "trained.ckpt", weights_only=True)["state_dict"]
    assert [f"model.{name}" for name in saved] == list(checkpoint)
    for name, value in saved.items():
        assert torch.equal(value, checkpoint[f"model.{name}"]), name
        assert not torch.equal(value, before[name]), name


def test_export_writes_files_of_a_size_and_says_how_far_it_is(seen, root):
    told: list[tuple[int, int]] = []
    command.export(root / "trained.ckpt", root / "pieces", None, "40KB", lambda *counts: told.append(counts))
    shards = list((root / "pieces").glob("*.safetensors"))
    assert len(shards) == len(told) >= 3
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1][0] == told[-1][1]
    assert text(root / "pieces") == text(root / "trained")


def test_a_full_disk_leaves_nothing(seen, root, capsys):
    full = mock.patch.object(command, "write_shards", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(SystemExit):
        main(["export", "--checkpoint", str(root / "trained.ckpt"), "--output", str(root / "never")])
    assert "never cannot be written: [Errno 28] No space left on device" in capsys.readouterr().err
    assert not [path for path in root.iterdir() if "never" in path.name]


def test_a_weight_of_another_shape_is_refused(seen, root, capsys):
    content = torch.load(root / "trained.ckpt", weights_only=True)
    content["state_dict"]["model.model.norm.weight"] = torch.zeros(3)
    torch.save(content, root / "shape.ckpt")
    with pytest.raises(SystemExit):
        main(["export", "--checkpoint", str(root / "shape.ckpt"), "--output", str(root / "never")])
    assert "size mismatch for model.norm.weight" in capsys.readouterr().err
