"""`fit`, `validate`, `test`, `predict`: YAML in, a run out; and mistakes end before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel
from support.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from support.tiny_models import tiny_model

from lightning_seq1f1b import CausalLM
from lightning_seq1f1b.cli.main import main


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning-seq1f1b"])


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A directory with a tiny Llama and its tokenizer, and beside it `a.txt` and `b.txt`."""
    tiny_model("llama", torch.float32, vocab_size=VOCAB_SIZE).save_pretrained(tmp_path / "start")
    save_byte_tokenizer(tmp_path / "start")
    (tmp_path / "a.txt").write_text("one text to learn, " * 8)
    (tmp_path / "b.txt").write_text("another text, " * 8)
    return tmp_path / "start"


def written(config: dict, name: str = "run-me.yaml") -> str:
    Path(name).write_text(yaml.safe_dump(config))
    return name


def run_config(**trainer) -> dict:
    """A run on one device without a pipeline, in the short form that leaves the ready classes' names out."""
    return {
        "trainer": {"strategy": "auto", "accelerator": "cpu", "devices": 1, "max_epochs": 1, **trainer},
        "model": {"model_name_or_path": "start", "learning_rate": 1e-2},
        "data": {"files": ["*.txt"], "tokenizer": "start", "sequence_length": 32, "validation": 0.5, "test": ["b.txt"]},
    }


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    with pytest.raises(SystemExit) as exit_:
        main(["fit", *argv, "--print_config"])
    assert exit_.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["fit", *argv])
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_the_defaults_are_our_strategy_module_and_data(capsys):
    config = printed(capsys)
    strategy, model, data = config["trainer"]["strategy"], config["model"], config["data"]
    assert strategy["class_path"].endswith("Seq1F1BStrategy")
    assert strategy["init_args"]["num_chunks"] == strategy["init_args"]["num_microbatches"] == "auto"
    assert model["class_path"].endswith("CausalLM")
    assert data["class_path"].endswith("LongDocuments")
    assert config["trainer"]["gradient_clip_val"] == 1.0
    assert config["seed_everything"] == 0


@pytest.mark.parametrize(
    "strategy",
    [
        {"num_chunks": 8},
        {"class_path": "Seq1F1BStrategy", "init_args": {"num_chunks": 8, "partition": [3, 5]}},
        {"class_path": "lightning_seq1f1b.Seq1F1BStrategy", "init_args": {"num_chunks": 8}},
        "seq1f1b",
    ],
)
def test_print_config_round_trips(capsys, strategy):
    first = printed(capsys, "--config", written({**run_config(), "trainer": {"strategy": strategy}}))
    assert printed(capsys, "--config", written(first, "again.yaml")) == first
    if isinstance(strategy, str):
        assert first["trainer"]["strategy"] == strategy
    else:
        given = strategy.get("init_args", strategy)
        assert given.items() <= first["trainer"]["strategy"]["init_args"].items()
        overridden = printed(capsys, "--config", "again.yaml", "--trainer.strategy.num_chunks=2")
        assert overridden["trainer"]["strategy"]["init_args"]["num_chunks"] == 2


@pytest.mark.parametrize(
    ("path", "key", "message"),
    [
        (("trainer",), "max_step", "'trainer.max_step'"),
        (("model",), "learning_rat", "'learning_rat' is not accepted"),
        (("data",), "sequence_lenght", "'sequence_lenght' is not accepted"),
        (("trainer", "strategy"), "num_chunk", "'num_chunk' is not accepted"),
        ((), "trainr", "'trainr'"),
        ((), "optimizer", "set model.optimizer"),
        ((), "lr_scheduler", "set model.warmup_steps and model.decay"),
    ],
)
def test_a_wrong_key_is_named(capsys, path, key, message):
    config = run_config(strategy={"num_chunks": 2})
    target = config
    for part in path:
        target = target[part]
    target[key] = 3
    assert message in refusal(capsys, "--config", written(config))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--data.sequence_length=abc", "sequence_length"),
        ("--data.sequence_length=1", "sequence_length must be at least 2"),
        ("--model.config.model_type=llama", "got both"),
        ("--model.learning_rate=-1", "learning_rate must not be negative"),
        ("--model.decay=square", "decay"),
    ],
)
def test_a_wrong_value_is_named(capsys, argument, message):
    assert message in refusal(capsys, "--config", written(run_config()), argument)


def test_a_bare_name_with_arguments_gets_advice(capsys):
    error = refusal(capsys, "--trainer.strategy=seq1f1b", "--trainer.strategy.num_chunks=8")
    assert "The name 'seq1f1b' takes no arguments" in error


def test_fit_trains_saves_and_can_be_evaluated_and_resumed(start, capsys):
    config = written(run_config())
    assert main(["fit", "--config", config]) == 0
    (checkpoint,) = Path("lightning_logs").rglob("*.ckpt")
    trained = CausalLM.load_from_checkpoint(checkpoint)
    assert not torch.equal(trained.model.lm_head.weight, tiny_model("llama", vocab_size=VOCAB_SIZE).lm_head.weight)

    (saved,) = Path("lightning_logs").rglob("run.yaml")
    assert yaml.safe_load(saved.read_text())["data"]["init_args"]["files"] == ["*.txt"]
    saved_run = str(saved.rename("again.yaml"))

    capsys.readouterr()
    assert main(["validate", "--config", config, "--ckpt_path", str(checkpoint)]) == 0
    assert "val_perplexity" in capsys.readouterr().out
    assert main(["test", "--config", config, "--ckpt_path", str(checkpoint)]) == 0
    assert "test_perplexity" in capsys.readouterr().out
    assert main(["predict", "--config", config, "--ckpt_path", str(checkpoint)]) == 0

    assert main(["fit", "--config", saved_run, "--ckpt_path", str(checkpoint), "--trainer.max_epochs=2"]) == 0
    steps = {torch.load(path, weights_only=True)["global_step"] for path in Path("lightning_logs").rglob("*.ckpt")}
    assert steps == {4, 8}


def test_a_run_can_be_repeated_in_the_same_directory(start):
    config = written(run_config(logger=False))
    for _ in range(2):
        assert main(["fit", "--config", config]) == 0
    assert yaml.safe_load(Path("run.yaml").read_text())["trainer"]["logger"] is False
    assert yaml.safe_load(Path(config).read_text()) == run_config(logger=False), "the user's own file is left alone"


def test_another_optimizer_by_class_path(start):
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.5}}
    config = run_config()
    config["model"]["optimizer"] = optimizer
    assert main(["fit", "--config", written(config)]) == 0
    (checkpoint,) = Path("lightning_logs").rglob("*.ckpt")
    groups = torch.load(checkpoint, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert [group["momentum"] for group in groups] == [0.5, 0.5]


class OtherModule(BoringModel):
    """A module of somebody's own with its own loaders."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def training_step(self, batch, batch_idx):
        """Leave a trace that the module ran."""
        Path("ran").write_text(str(self.factor))
        return super().training_step(batch, batch_idx)


def test_another_module_without_a_data_module(tmp_path):
    config = {
        "trainer": {**run_config()["trainer"], "max_steps": 1},
        "model": {"class_path": f"{OtherModule.__module__}.OtherModule", "init_args": {"factor": 3.0}},
        "data": None,
    }
    assert main(["fit", "--config", written(config)]) == 0
    assert Path("ran").read_text() == "3.0"
