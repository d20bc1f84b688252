"""The callback that shows samples: the same texts on one device and on stages, and training as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from support.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from support.processes import run_processes
from support.tiny_models import tiny_model
from support.training import QUIET, Recorder

from lightning_seq1f1b import CausalLM, LongDocuments, SampleText, Seq1F1BStrategy

PROMPTS = ["document 1 is", "so long"]


def train(rank: int, folder: str, devices: int, sampling: bool = True) -> dict[str, Any]:
    """Two epochs with a validation after every step; what the rank saw and logged."""
    data = LongDocuments(f"{folder}/*.txt", f"{folder}/start", sequence_length=48, batch_size=3, validation=0.2, seed=3)
    recorder = Recorder()
    samples = SampleText(PROMPTS, 2, max_new_tokens=8, options={"do_sample": True, "num_return_sequences": 2})
    strategy = Seq1F1BStrategy(num_chunks=3) if devices > 1 else "auto"
    logger = TensorBoardLogger(folder, name=f"log{devices}") if sampling else False
    options = {**QUIET, "logger": logger, "max_epochs": 2, "val_check_interval": 1, "log_every_n_steps": 1}
    callbacks = [recorder, samples] if sampling else [recorder]
    trainer = L.Trainer(**options, devices=devices, strategy=strategy, callbacks=callbacks)
    torch.manual_seed(0)
    trainer.fit(CausalLM(f"{folder}/start", learning_rate=1e-3), data)
    return {"texts": samples.texts, "losses": recorder.losses, "log": logger.log_dir if logger else None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    tiny_model("llama", torch.float32, vocab_size=VOCAB_SIZE).save_pretrained(folder / "start")
    save_byte_tokenizer(folder / "start")
    for index in range(12):
        (folder / f"{index}.txt").write_text(f"document {index} is so long: " * (1 + index % 4))
    return folder


def logged_steps(log: str) -> list[tuple[int, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(log)
    events.Reload()
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors("samples/text_summary")]


def test_texts_and_training_are_those_of_one_device(folder, capsys):
    one = train(0, str(folder), 1)
    printed = capsys.readouterr().out
    first, second = run_processes(train, 2, str(folder), 2)
    assert len(set(one["texts"])) == 4
    assert first["texts"] == second["texts"] == one["texts"]
    torch.testing.assert_close(first["losses"], one["losses"], rtol=0, atol=5e-6)
    assert train(0, str(folder), 1, sampling=False)["losses"] == one["losses"]
    texts = logged_steps(one["log"])
    assert logged_steps(first["log"]) == texts
    assert [step for step, _ in texts] == list(range(2, len(one["losses"]) + 1, 2))
    step, last = texts[-1]
    for prompt, text in zip([PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]], one["texts"], strict=True):
        assert f"**{prompt}** {text}" in last
        assert f"step {step} | {prompt}[{text}]" in printed


def test_a_config_file_can_name_it(folder, tmp_path):
    arguments = {"prompts": ["a"], "every_n_validations": 3, "options": {"temperature": 0.5}}
    cli = LightningCLI(
        CausalLM,
        args={
            "model": {"model_name_or_path": str(folder / "start")},
            "trainer": {"callbacks": [{"class_path": "lightning_seq1f1b.SampleText", "init_args": arguments}]},
        },
        run=False,
        save_config_callback=None,
    )
    (callback,) = [each for each in cli.trainer.callbacks if isinstance(each, SampleText)]
    assert (callback.prompts, callback.every_n_validations, callback.options) == (["a"], 3, {"temperature": 0.5})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "needs prompts"),
        ({"prompts": ["a", ""]}, "needs prompts, none of them empty"),
        ({"prompts": ["a"], "every_n_validations": 0}, "every_n_validations must be at least 1, got 0"),
        ({"prompts": ["a"], "max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        SampleText(**arguments)


def test_without_a_tokenizer():
    with pytest.raises(ValueError, match=r"finds no tokenizer.*SampleText\(tokenizer=...\)"):
        SampleText(["a"])._find_tokenizer(L.Trainer(**QUIET))
