"""The ready module and data module over two stages: losses, metrics, order of the data and checkpoint of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from support.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from support.processes import run_processes
from support.tiny_models import tiny_model
from support.training import QUIET, Recorder

from lightning_seq1f1b import CausalLM, LongDocuments, Seq1F1BStrategy


def train(rank: int, folder: str, strategy: dict[str, Any] | None) -> dict[str, Any]:
    """Two epochs and a test; what the rank saw. The checkpoint goes to `folder`, named after the strategy."""
    start = f"{folder}/start"
    data = LongDocuments(
        f"{folder}/*.txt", start, sequence_length=48, batch_size=3, validation=0.2, test=0.2, shuffle=True, seed=3
    )
    optimizer = {"optimizer": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)}
    module = CausalLM(start, warmup_steps=2, **optimizer)
    recorder = Recorder()
    where = {"devices": 1} if strategy is None else {"devices": 2, "strategy": Seq1F1BStrategy(**strategy)}
    trainer = L.Trainer(**QUIET, max_epochs=2, gradient_clip_val=0.5, callbacks=[recorder], **where)
    trainer.fit(module, data)
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.save_checkpoint(f"{folder}/{'one' if strategy is None else 'two'}.ckpt")
    (tested,) = trainer.test(module, data, verbose=False)
    predicted = [float(output["perplexity"]) for output in trainer.predict(module, data)]
    return {"losses": recorder.losses, "fitted": fitted, "tested": tested, "predicted": predicted}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    tiny_model("llama", torch.float32, vocab_size=VOCAB_SIZE, tie_word_embeddings=True).save_pretrained(
        folder / "start"
    )
    save_byte_tokenizer(folder / "start")
    for index in range(16):
        (folder / f"{index}.txt").write_text(f"document {index} is so long: " * (1 + index % 4))
    return folder


def test_two_stages_equal_one_device(folder):
    expected = train(0, str(folder), None)
    assert len(set(expected["losses"])) == len(expected["losses"]) > 6
    assert expected["losses"][-1] < expected["losses"][0] - 0.5
    for seen in run_processes(train, 2, str(folder), {"num_chunks": 3}):
        torch.testing.assert_close(seen, expected, atol=5e-6, rtol=5e-6)  # perplexities are near 100
    one, two = (torch.load(folder / f"{name}.ckpt", weights_only=True) for name in ("one", "two"))
    assert one["transformers_config"] == two["transformers_config"]
    assert one["hyper_parameters"] == two["hyper_parameters"]
    assert list(one["state_dict"]) == list(two["state_dict"])
    for name, weight in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], weight, atol=5e-6, rtol=0, msg=name)
