"""A checkpoint goes out as a Hugging Face directory with the same model in it."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from support.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from support.processes import run_processes
from support.tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_seq1f1b import CausalLM, LongDocuments, Seq1F1BStrategy
from lightning_seq1f1b.cli.main import main


def trained(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **overrides) -> CausalLM:
    """A module after two steps; its checkpoint is `folder / "a.ckpt"`, its tokenizer lies in `folder / "start"`."""
    tiny_model(family, dtype, vocab_size=VOCAB_SIZE, **overrides).save_pretrained(folder / "start")
    save_byte_tokenizer(folder / "start")
    (folder / "a.txt").write_text("a text to learn, " * 5)
    module = CausalLM(str(folder / "start"), learning_rate=1e-2)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-true" if dtype is torch.bfloat16 else "32-true",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, LongDocuments(str(folder / "a.txt"), str(folder / "start"), sequence_length=32))
    trainer.save_checkpoint(folder / "a.ckpt")
    return module


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"tie_word_embeddings": True}),
        ("gpt2", {}),
        ("mixtral", {}),
    ],
)
def test_the_exported_model_gives_the_same_logits(tmp_path, family, overrides):
    module = trained(tmp_path, family, **overrides)
    assert main(["export", "--checkpoint", str(tmp_path / "a.ckpt"), "--output", str(tmp_path / "out")]) == 0
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation=module.model.config._attn_implementation
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, module.model.eval()(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("héllo")["input_ids"] == AutoTokenizer.from_pretrained(tmp_path / "start")("héllo")["input_ids"]


def test_weights_keep_their_dtype(tmp_path):
    module = trained(tmp_path, dtype=torch.bfloat16)
    main(["export", "--checkpoint", str(tmp_path / "a.ckpt"), "--output", str(tmp_path / "out")])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, parameter in module.model.named_parameters():
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_the_original_files_are_not_needed(tmp_path):
    trained(tmp_path)
    tokenizer = save_byte_tokenizer(tmp_path / "elsewhere")
    (tmp_path / "start").rename(tmp_path / "gone")
    command = ["export", "--checkpoint", str(tmp_path / "a.ckpt"), "--output", str(tmp_path / "out")]
    assert main([*command, "--tokenizer", tokenizer]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_tokenizer_that_is_gone_is_named_before_anything_is_written(tmp_path, capsys):
    trained(tmp_path)
    (tmp_path / "start").rename(tmp_path / "gone")
    with pytest.raises(SystemExit) as exit_:
        main(["export", "--checkpoint", str(tmp_path / "a.ckpt"), "--output", str(tmp_path / "out")])
    assert exit_.value.code == 2
    assert "cannot be loaded; give another as tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class Malicious:
    def __reduce__(self):
        return (Path.touch, (Path(self.target),))

    def __init__(self, target):
        self.target = str(target)


def test_code_in_a_checkpoint_is_not_run(tmp_path, capsys):
    torch.save({"state_dict": {}, "transformers_config": Malicious(tmp_path / "hacked")}, tmp_path / "a.ckpt")
    with pytest.raises(SystemExit):
        main(["export", "--checkpoint", str(tmp_path / "a.ckpt"), "--output", str(tmp_path / "out")])
    assert "holds more than tensors and plain values" in capsys.readouterr().err
    assert not (tmp_path / "hacked").exists()


def sharded(rank: int, folder: Path) -> None:
    """A module after a step on one stage; its checkpoint is the directory `folder / "a.sharded"`."""
    strategy = Seq1F1BStrategy(num_chunks=2, state_dict_type="sharded")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = CausalLM(str(folder / "start"), learning_rate=1e-2)
    trainer.fit(module, LongDocuments(str(folder / "a.txt"), str(folder / "start"), sequence_length=32))
    trainer.save_checkpoint(folder / "a.sharded")
    strategy.state_dict_type = "full"
    trainer.save_checkpoint(folder / "full.ckpt")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    trained(folder, tie_word_embeddings=True)
    run_processes(sharded, 1, folder)
    return folder


def test_a_sharded_checkpoint_is_exported_too(directory):
    for name in ("a.sharded", "full.ckpt"):
        assert main(["export", "--checkpoint", str(directory / name), "--output", str(directory / f"{name} out")]) == 0
    one, other = (
        AutoModelForCausalLM.from_pretrained(directory / f"{name} out") for name in ("a.sharded", "full.ckpt")
    )
    assert AutoTokenizer.from_pretrained(directory / "a.sharded out")
    for name, value in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], value)


def test_a_sharded_checkpoint_becomes_one_file(directory, capsys):
    command = ["consolidate", "--checkpoint", str(directory / "a.sharded"), "--output", str(directory / "one.ckpt")]
    assert main(command) == 0
    assert "one.ckpt: " in capsys.readouterr().out
    assert list(torch.load(directory / "one.ckpt")) == list(torch.load(directory / "full.ckpt"))
    module = CausalLM.load_from_checkpoint(directory / "one.ckpt")
    expected = torch.load(directory / "full.ckpt")["state_dict"]
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name])
    with pytest.raises(SystemExit):
        main(command)
    assert "exists already: choose another name" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command[:2], str(directory / "start"), "--output", str(directory / "two.ckpt")])
    assert "start is no sharded checkpoint: it has no meta.pt" in capsys.readouterr().err


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: str = "a.ckpt") -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["export", "--checkpoint", str(tmp_path / checkpoint), "--output", str(tmp_path / "out")])
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_what_is_no_checkpoint_of_the_module_is_refused(tmp_path, capsys):
    assert "there is no checkpoint" in refused(tmp_path, capsys)
    (tmp_path / "a.ckpt").write_text("no checkpoint")
    assert "is no checkpoint" in refused(tmp_path, capsys)
    torch.save({"state_dict": {}}, tmp_path / "a.ckpt")
    assert "was not written by CausalLM" in refused(tmp_path, capsys)


def test_a_cut_off_file_is_refused(tmp_path, capsys):
    trained(tmp_path)
    whole = (tmp_path / "a.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    assert "is cut off or damaged" in refused(tmp_path, capsys, "cut.ckpt")


def test_missing_and_unknown_weights_are_all_named(tmp_path, capsys):
    trained(tmp_path)
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    weights = content["state_dict"]
    del weights["model.model.norm.weight"], weights["model.model.layers.1.mlp.up_proj.weight"]
    weights["model.extra"] = torch.zeros(1)
    torch.save(content, tmp_path / "a.ckpt")
    message = refused(tmp_path, capsys)
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "extra"):
        assert f"'{name}'" in message


def test_a_directory_with_files_is_not_written_into(tmp_path, capsys):
    trained(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert "choose a new or empty directory" in refused(tmp_path, capsys)
