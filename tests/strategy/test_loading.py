"""`from_pretrained` in `configure_model` reads this rank's tensors, shows the whole model, and changes nothing else."""

from __future__ import annotations

import gc
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fitting import ONE_DEVICE, Where, difference, stages, weights
from support.pretrained import Pretrained, rows, spoil, trainer, write_checkpoint
from support.processes import run_processes
from support.tiny_models import tiny_model
from transformers import AutoModelForCausalLM

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {}),
    "gemma2": ("gemma2", {}),
    "qwen3": ("qwen3", {}),
    "gpt_oss": ("gpt_oss", {}),
}

CUTS: dict[str, Where] = {
    "even": stages(),
    "uneven": stages(layers=[1, 3]),
    "virtual": stages(virtual_stages=2, schedule="interleaved_seq1f1b"),
    "auto": stages(schedule="auto", num_chunks="auto"),
}


def refusal(function: Any, *args: Any, **kwargs: Any) -> str:
    """The kind and message of the exception that a call raises; "" without one."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- cases, run on two connected processes -------------------------------------------------------------------------


def load_only(where: Where, path: Path, **options: Any) -> dict[str, Any]:
    """Load and cut, without a step: what `configure_model` saw, and the weights."""
    module = Pretrained(path, **options)
    run = trainer(where, max_steps=0)
    run.fit(module, rows())
    layers = tuple(map(len, run.strategy._cut.layer_ranges))
    return {"names": module.names, "empty": module.empty, "weights": weights(run), "layers": layers}


def freeze_and_adapt(module: Any) -> None:
    """LoRA on the queries, as a user adds it: its first matrices are random."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    module.model = get_peft_model(module.model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def fit(where: Where, path: Path, then: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    """Two steps; the weights after them."""
    torch.manual_seed(0)
    run = trainer(where, **options)
    run.fit(Pretrained(path, then), rows())
    return weights(run)


def validate_fit_and_fit_again(where: Where, path: Path, checkpoint: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """One Trainer validates, then fits; a second one fits on; a third one goes on with a new module from a file."""
    torch.manual_seed(0)
    module = Pretrained(path)
    run = trainer(where)
    (validated,) = run.validate(module, rows(), verbose=False)
    run.fit(module, rows())
    run.save_checkpoint(checkpoint)
    again = trainer(where)
    again.fit(module, rows())
    resumed = trainer(where, max_steps=4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*meta parameter.*")
        resumed.fit(Pretrained(path), rows(), ckpt_path=checkpoint)
    return [validated["val_loss"], weights(again)], weights(resumed)


def teacher_logits(where: Where, path: Path) -> torch.Tensor:
    """What a second model, loaded beside the one to train and kept out of the attributes, gives after all."""
    teachers = []

    def teach(module: Any) -> None:
        teachers.append(AutoModelForCausalLM.from_pretrained(path).requires_grad_(False))
        assert any(value.is_meta for value in teachers[0].parameters())

    trainer(where, max_steps=0).fit(Pretrained(path, teach), rows())
    return teachers[0](torch.arange(3, 12)[None]).logits


def resize(module: Any) -> None:
    """New rows of embeddings, which transformers draws around the mean of the old ones."""
    module.model.resize_token_embeddings(100)


def draw_on_one_rank(module: Any) -> None:
    """Random numbers only where a weight has values."""
    if not module.model.get_input_embeddings().weight.is_meta:
        torch.randn(1)


def refused(where: Where, path: Path, then: Any = None, **options: Any) -> str:
    torch.manual_seed(0)
    return refusal(trainer(where, max_steps=1).fit, Pretrained(path, then, **options), rows())


def all_cases(rank: int, root: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {name: load_only(CUTS["even"], root / name) for name in FAMILIES}
    seen |= {cut: load_only(CUTS[cut], root / "llama") for cut in CUTS}
    seen["one stage"] = load_only(stages(num_stages=1), root / "llama")
    seen["bin"] = load_only(CUTS["even"], root / "bin")
    seen["float32"] = load_only(CUTS["even"], root / "llama", dtype=torch.float32)
    seen["ignoring"] = load_only(CUTS["even"], root / "shape", ignore_mismatched_sizes=True)
    seen["lora"] = fit(CUTS["uneven"], root / "llama", freeze_and_adapt)
    seen["again"] = validate_fit_and_fit_again(CUTS["even"], root / "llama", root / "two.ckpt")
    seen["teacher"] = teacher_logits(CUTS["even"], root / "llama")
    seen["resized"] = refused(CUTS["even"], root / "llama", resize)
    seen["drawn"] = refused(CUTS["even"], root / "llama", draw_on_one_rank)
    for spoilt in ("misfit", "shape", "untied", "cut off"):
        seen[spoilt] = refused(CUTS["even"], root / spoilt)
    seen["no weights on rank 1"] = refused(CUTS["even"], root / ("llama" if rank == 0 else "no weights"))
    return seen


def make_checkpoints(root: Path) -> None:
    for name, (family, overrides) in FAMILIES.items():
        write_checkpoint(root / name, family, **overrides)
    for name in ("misfit", "shape", "cut off", "bin"):
        shutil.copytree(root / "llama", root / name)
    shutil.copytree(root / "tied", root / "untied")

    def misfit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.embed_tokens.weight"], tensors["model.layers.3.mlp.up_proj.weight"]
        tensors["model.layers.0.surplus"], tensors["stray"] = torch.zeros(2), torch.ones(3)
        tensors["lm_head.weight"] = torch.zeros(7, 32)

    spoil(root / "misfit", misfit)
    spoil(root / "shape", lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(3, 3)}))
    spoil(root / "untied", lambda tensors: tensors.update({"lm_head.weight": torch.zeros_like(tensors[EMBEDDING])}))
    (root / "no weights").mkdir()
    shutil.copy(root / "llama" / "config.json", root / "no weights")
    torch.save(tiny_model("llama", torch.float64).state_dict(), root / "bin" / "pytorch_model.bin")
    for file in (root / "bin").glob("model*"):
        file.unlink()
    *_, last = sorted((root / "cut off").glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1000])


EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pretrained")
    make_checkpoints(root)
    return root


@pytest.fixture(scope="module")
def seen(root: Path) -> list[dict[str, Any]]:
    return run_processes(all_cases, 2, root)


# ---- what is read --------------------------------------------------------------------------------------------------


def whole(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path, **options).state_dict()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_reads_its_tensors_and_sees_the_whole_model(seen, root, name):
    expected = whole(root / name)
    first, last = (each[name] for each in seen)
    assert first["names"] == last["names"] == list(expected)
    both = set(expected) - first["empty"] - last["empty"]
    assert not first["empty"] & last["empty"]
    tied = name in ("tied", "gpt2", "gemma2")
    # Layer 1 ends the first stage, layer 2 begins the last one.
    assert any(".1." in key for key in last["empty"])
    assert any(".2." in key for key in first["empty"])
    assert both == ({next(iter(expected)), "lm_head.weight"} if tied else set())
    got = {key.removeprefix("model."): value for key, value in first["weights"].items()}
    assert list(got) == list(expected)
    for key, value in expected.items():
        assert value.dtype is got[key].dtype is torch.float64
        assert torch.equal(value, got[key]), key


@pytest.mark.parametrize("cut", CUTS)
def test_stages_are_those_of_the_strategy(seen, root, cut):
    expected = whole(root / "llama")
    ranks = [each[cut] for each in seen]
    layers = ranks[0]["layers"]
    assert sum(layers) == 4
    assert {"even": (2, 2), "uneven": (1, 3), "virtual": (1, 1, 1, 1), "auto": layers}[cut] == layers
    for rank, each in enumerate(ranks):
        mine = [stage for stage in range(len(layers)) if stage % 2 == rank]
        here = {layer for stage in mine for layer in range(sum(layers[:stage]), sum(layers[: stage + 1]))}
        layered = {key: int(found[1]) for key in expected if (found := re.search(r"layers\.(\d+)", key))}
        assert each["empty"] & layered.keys() == {key for key, layer in layered.items() if layer not in here}
    assert difference(ranks[0]["weights"], {f"model.{key}": value for key, value in expected.items()}) == 0


def test_other_files_and_dtypes_are_those_of_transformers(seen, root):
    expected = {f"model.{key}": value for key, value in whole(root / "llama").items()}
    for rank in seen:
        assert not rank["one stage"]["empty"]
        assert rank["bin"]["empty"]
        assert not rank["ignoring"]["empty"]
    assert difference(seen[0]["one stage"]["weights"], expected) == 0
    assert difference(seen[0]["bin"]["weights"], expected) == 0
    for key, value in seen[0]["float32"]["weights"].items():
        assert torch.equal(value, expected[key].float())


# ---- going on with it ----------------------------------------------------------------------------------------------


def test_adapters_put_on_the_whole_model_train_as_on_one_device(seen, root):
    expected = fit(ONE_DEVICE, root / "llama", freeze_and_adapt)
    assert any("lora_A" in name for name in expected)
    assert difference(seen[0]["lora"], expected) < 1e-9


def test_validating_fitting_again_and_resuming_equal_one_device(seen, root):
    (loss, again), resumed = validate_fit_and_fit_again(ONE_DEVICE, root / "llama", root / "one.ckpt")
    (got, got_again), got_resumed = seen[0]["again"]
    assert abs(got - loss) < 1e-6
    assert difference(got_again, again) < 1e-9
    assert difference(got_resumed, resumed) < 1e-9


def test_a_second_model_is_whole_in_the_end(seen, root):
    expected = AutoModelForCausalLM.from_pretrained(root / "llama")(torch.arange(3, 12)[None]).logits
    for rank in seen:
        assert torch.equal(rank["teacher"], expected)


# ---- bad checkpoints -----------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_listed_on_all_ranks(seen):
    for rank in seen:
        lines = rank["misfit"].splitlines()
        assert lines[0].startswith("ValueError: the checkpoint")
        assert [line.strip() for line in lines[1:6]] == [
            "missing tensor: model.embed_tokens.weight",
            "missing tensor: model.layers.3.mlp.up_proj.weight",
            "unexpected tensor: model.layers.0.surplus",
            "unexpected tensor: stray",
            "wrong shape: lm_head.weight: [7, 32] saved, [97, 32] here",
        ]
        assert "wrong shape: model.layers.3.mlp.up_proj.weight: [3, 3] saved" in rank["shape"]
        assert "not tied: lm_head.weight and model.embed_tokens.weight have different values" in rank["untied"]


def test_what_one_rank_cannot_read_ends_all(seen):
    assert all("SafetensorError" in rank["cut off"] for rank in seen)
    first, other = (rank["no weights on rank 1"] for rank in seen)
    assert first.startswith("OSError: loading LlamaForCausalLM failed on pipeline rank 1: OSError: Error no file named")
    assert other.startswith("OSError: Error no file named")


def test_what_depends_on_other_stages_values_is_refused(seen):
    for rank in seen:
        assert "configure_model used weights of other stages" in rank["resized"]
        assert "drew different random numbers on different ranks" in rank["drawn"]
        assert "__init__" in rank["resized"]


# ---- memory --------------------------------------------------------------------------------------------------------


def memory(field: str) -> int:
    """Bytes, of this process."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def peaks(rank: int, root: Path) -> list[tuple[int, int]]:
    """Bytes of this rank's weights, and the highest memory above that of a process that has loaded a tiny model."""
    seen = []
    load_only(CUTS["even"], root / "small")
    for where in (stages(), stages(layers=[3, 9])):
        gc.collect()
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest value so far
        module = Pretrained(root / "big")
        trainer(where, max_steps=0).fit(module, rows())
        weight = sum(parameter.nbytes for parameter in module.parameters())
        for parameter in module.parameters():
            parameter.detach().sum()  # the pages of the file are read when they are first used
        seen.append((weight, memory("VmHWM") - before))
        del module
    return seen


@pytest.mark.behaviour(37)
def test_a_rank_needs_memory_for_its_share(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 1024}
    big = tiny_model("llama", torch.float32, num_hidden_layers=12, **sizes)
    total = sum(parameter.nbytes for parameter in big.parameters())
    big.save_pretrained(tmp_path / "big", max_shard_size="40MB")
    del big
    assert len(list((tmp_path / "big").glob("*.safetensors"))) >= 4
    tiny_model("llama", torch.float32).save_pretrained(tmp_path / "small")
    (first, uneven_first), (last, uneven_last) = run_processes(peaks, 2, tmp_path)
    assert total > 150e6
    assert uneven_last[0] > 2 * uneven_first[0]
    for weight, peak in (first, last, uneven_first, uneven_last):
        assert 0.7 * weight < peak < 1.1 * weight + 4e6, (weight, peak)
