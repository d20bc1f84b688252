"""`trainer.strategy.save_pretrained`: stages write together what transformers writes alone, whole or not at all."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.byte_tokenizer import save_byte_tokenizer
from support.fitting import Where, stages, weights
from support.pretrained import Pretrained, rows, stored_names, trainer, write_checkpoint
from support.processes import run_processes
from support.training import FineTune
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lightning_seq1f1b.strategy import saving

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {}),
    "gemma2": ("gemma2", {}),
    "qwen3": ("qwen3", {}),
    "gpt_oss": ("gpt_oss", {}),
}

TWO, VIRTUAL = stages(), stages(virtual_stages=2, schedule="interleaved_seq1f1b")
REPLICAS = stages(4, num_stages=2)


def fit_and_save(where: Where, module: FineTune, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    """One step, so that no weight is the file's any more; the weights, on rank 0."""
    run = trainer(where, max_steps=1)
    run.fit(module, rows())
    run.strategy.save_pretrained(out, **{"max_shard_size": "50KB", **options})
    return weights(run)


def write_half(state: Any, directory: Path, *_: Any) -> None:
    """Writing weights ends as on a full disk, within a first file."""
    (directory / "part.safetensors").write_bytes(b"half")
    raise OSError(28, "No space left on device")


def full_disk(*, here: bool) -> AbstractContextManager[Any]:
    """Inside, this rank cannot write weights, if it is the one."""
    return mock.patch.object(saving, "write_shards", write_half) if here else nullcontext()


def refusal(function: Any, *args: Any, **kwargs: Any) -> str:
    """The kind and message of the exception that a call raises; "" without one."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def on_two(rank: int, root: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name in FAMILIES:
        seen[name] = fit_and_save(TWO, Pretrained(root / name), root / "out" / name)
    seen["virtual"] = fit_and_save(VIRTUAL, Pretrained(root / "llama"), root / "out" / "virtual")
    seen["scratch"] = fit_and_save(TWO, FineTune("mixtral"), root / "out" / "scratch")
    run = trainer(TWO, max_steps=1)
    seen["too early"] = refusal(run.strategy.save_pretrained, root / "out" / "early")
    run.fit(Pretrained(root / "tied"), rows())
    save = run.strategy.save_pretrained
    for full in (0, 1):
        with full_disk(here=rank == full):
            seen[f"full {full}"] = refusal(save, root / "out" / "full")
    seen["left"] = sorted(path.name for path in (root / "out").iterdir() if "full" in path.name)
    seen["taken"] = refusal(save, root / "tied")
    seen["below a file"] = refusal(save, root / "tied" / "config.json" / "out")
    seen["no tokenizer"] = refusal(save, root / "out" / "full", tokenizer=root / "nowhere")
    (root / "out" / "named").mkdir(exist_ok=True)
    save(root / "out" / "named", tokenizer=str(root / "tokenizer"))
    return seen


def on_four(rank: int, root: Path) -> dict[str, Any]:
    seen = {"replicas": fit_and_save(REPLICAS, Pretrained(root / "tied"), root / "out" / "replicas")}
    with full_disk(here=rank == 1):
        seen["full"] = refusal(fit_and_save, REPLICAS, Pretrained(root / "tied"), root / "out" / "fullest")
    return seen


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    (root / "out").mkdir()
    for name, (family, overrides) in FAMILIES.items():
        write_checkpoint(root / name, family, torch.float32, **overrides)  # grouped experts know no float64
    GenerationConfig(max_new_tokens=7).save_pretrained(root / "llama")
    save_byte_tokenizer(root / "tokenizer")
    return root


@pytest.fixture(scope="module")
def two(root: Path) -> list[dict[str, Any]]:
    return run_processes(on_two, 2, root)


@pytest.fixture(scope="module")
def four(root: Path) -> list[dict[str, Any]]:
    return run_processes(on_four, 4, root)


def assert_holds(out: Path, saved: dict[str, torch.Tensor], original: Path | None) -> None:
    """A directory gives the weights bit by bit, and has the names of the files that transformers writes."""
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert [f"model.{name}" for name in model.state_dict()] == list(saved)
    for name, value in model.state_dict().items():
        assert value.dtype is saved[f"model.{name}"].dtype
        assert torch.equal(value, saved[f"model.{name}"]), name
    names = sorted(path.name for path in out.glob("*.safetensors"))
    assert names == [f"model-{index + 1:05d}-of-{len(names):05d}.safetensors" for index in range(len(names))]
    assert len(names) > 2
    if original is not None:
        assert stored_names(out) == stored_names(original)
        before = AutoModelForCausalLM.from_pretrained(original)
        assert model.config.to_diff_dict() == before.config.to_diff_dict()
        assert model.generation_config.to_dict() == before.generation_config.to_dict()
        assert not torch.equal(before.get_output_embeddings().weight, model.get_output_embeddings().weight)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_saved_is_what_was_trained(two, root, name):
    assert_holds(root / "out" / name, two[0][name], root / name)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2"])
def test_logits_are_those_of_the_trained_model(two, root, name):
    trained = AutoModelForCausalLM.from_pretrained(root / name)
    trained.load_state_dict({key.removeprefix("model."): value for key, value in two[0][name].items()})
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        saved = AutoModelForCausalLM.from_pretrained(root / "out" / name)(tokens).logits
        assert torch.equal(saved, trained(tokens).logits)


def test_virtual_stages_and_replicas_write_every_weight_once(two, four, root):
    assert_holds(root / "out" / "virtual", two[0]["virtual"], root / "llama")
    assert_holds(root / "out" / "replicas", four[0]["replicas"], root / "tied")


def test_a_model_made_from_a_config_is_saved_as_well(two, root):
    assert_holds(root / "out" / "scratch", two[0]["scratch"], None)
    assert any(".experts.3." in name for name in stored_names(root / "out" / "scratch"))


def test_tokenizer_and_generation_config_lie_beside_the_weights(two, root):
    tokenizer = AutoTokenizer.from_pretrained(root / "out" / "named")
    assert tokenizer("héllo")["input_ids"] == AutoTokenizer.from_pretrained(root / "tokenizer")("héllo")["input_ids"]
    assert GenerationConfig.from_pretrained(root / "out" / "llama").max_new_tokens == 7


def test_a_full_disk_on_one_rank_ends_all_and_leaves_nothing(two, four, root):
    for full in (0, 1):
        own, other = two[full][f"full {full}"], two[1 - full][f"full {full}"]
        assert own == "OSError: [Errno 28] No space left on device"
        assert other == f"OSError: saving the model failed on pipeline rank {full}: {own}"
    assert two[0]["left"] == two[1]["left"] == []
    assert all("No space left on device" in rank["full"] for rank in four)
    assert not (root / "out" / "fullest").exists()
    assert not list((root / "out").glob(".*"))


def test_what_cannot_be_written_is_said_on_all_ranks(two, root):
    for rank in two:
        assert "call save_pretrained in a run or after it" in rank["too early"]
        assert "choose a new or empty directory" in rank["taken"]
        assert "NotADirectoryError" in rank["below a file"]
        assert rank["no tokenizer"].startswith(("OSError", "ValueError"))
    assert not (root / "out" / "full").exists()
    assert stored_names(root / "tied")
