"""LoRA and its relatives under the strategy equal plain peft on one device, and plain peft loads what is saved."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from support.fitting import ONE_DEVICE, Case, Where, everywhere, fit, rows, stages, weights
from support.float64 import float64_throughout
from support.processes import run_processes
from support.tiny_models import tiny_model
from support.training import FineTune
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-10


class Adapted(FineTune):
    """A tiny model in double precision with adapters, which knows nothing of stages."""

    def __init__(self, config: Any, *, recompute: bool = False, family: str = "llama", **overrides: Any) -> None:
        super().__init__(family, torch.float64, **overrides)
        self.config, self.recompute = config, recompute

    def configure_model(self) -> None:
        if hasattr(self, "model"):
            return
        model = self.base()
        if self.recompute:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        self.model = get_peft_model(model, self.config).double()
        self.initial = {f"model.{name}": value.clone() for name, value in self.model.state_dict().items()}

    def base(self) -> Any:
        torch.manual_seed(2)
        return tiny_model(self.family, torch.float64, attention="sdpa", **self.overrides)


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "target_modules": "all-linear", "init_lora_weights": False, **options})


TWO_IN_TURN = {"schedule": "interleaved_seq1f1b_zb", "virtual_stages": 2}
TIED = {"tie_word_embeddings": True}

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as initialised": ({"config": lora(init_lora_weights=True, use_rslora=True, task_type="CAUSAL_LM")}, {}),
    "dora": ({"config": lora(use_dora=True)}, TWO_IN_TURN),
    "recomputed": ({"config": lora(), "recompute": True}, {**TWO_IN_TURN, "schedule": "interleaved_seq1f1b"}),
    "trained head": ({"config": lora(target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]), **TIED}, {}),
    "tied embeddings": ({"config": lora(target_modules=["q_proj", "embed_tokens"]), **TIED}, {}),
    "biases": (
        {"config": lora(bias="all", target_modules=["c_attn"], fan_in_fan_out=True), "family": "gpt2"},
        {"schedule": "seq1f1b_zb"},
    ),
}
"""Arguments of the module and of the strategy."""


def adapted(name: str, where: Where) -> dict[str, Any]:
    """The loss, and the weights before and after two steps."""
    tiny_model("llama")
    tiny_model("gpt2")
    module_arguments, strategy_arguments = SETTINGS[name]
    if where != ONE_DEVICE:
        where = stages(where.devices, **strategy_arguments)
    with float64_throughout():
        module = Adapted(**module_arguments)
        trainer = fit(where, module, rows(5), max_epochs=1, precision="64-true", num_sanity_val_steps=0)
        loss = float(trainer.callback_metrics["train_loss_epoch"])
        return {"loss": loss, "before": module.initial, "after": weights(trainer)}


CASES: dict[str, Case] = {name: partial(adapted, name) for name in SETTINGS}
FOR = {2: tuple(CASES), 3: ("as initialised", "tied embeddings")}


@pytest.mark.parametrize(
    ("num_ranks", "name"), [(num_ranks, name) for num_ranks, names in FOR.items() for name in names]
)
def test_only_adapters_move_and_as_on_one_device(num_ranks: int, name: str) -> None:
    cases = tuple(CASES[each] for each in FOR[num_ranks])
    results = everywhere(cases, stages(num_ranks))[CASES[name]]
    (expected,) = everywhere((CASES[name],), ONE_DEVICE)[CASES[name]]
    assert all(abs(result["loss"] - expected["loss"]) < TOLERANCE for result in results)
    before, after = expected["before"], results[0]["after"]
    assert list(after) == list(expected["after"]) == list(before)
    for key, value in after.items():
        assert float((value - expected["after"][key]).abs().max()) < TOLERANCE, key
        trained = "lora_" in key or "modules_to_save" in key or (name == "biases" and key.endswith(".bias"))
        assert trained == (not torch.equal(value, before[key])), key


class FromCheckpoint(Adapted):
    """Loads a checkpoint in shards, and has two adapters, of which the second is trained."""

    def __init__(self, path: str) -> None:
        super().__init__(lora(init_lora_weights=True))
        self.path = path

    def base(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float64)

    def configure_model(self) -> None:
        super().configure_model()
        if len(self.model.peft_config) == 1:
            self.model.add_adapter("second", lora(target_modules=["o_proj", "embed_tokens"], init_lora_weights=True))
            self.model.set_adapter("second")
            self.model.double()


def save_after_training(rank: int, path: str, directory: str | None) -> dict[str, torch.Tensor]:
    tiny_model("llama")
    with float64_throughout():
        where = ONE_DEVICE if directory is None else stages(2)
        module = FromCheckpoint(path)
        trainer = fit(where, module, rows(5), max_epochs=1, precision="64-true", num_sanity_val_steps=0)
        if directory is not None:
            trainer.strategy.save_pretrained(directory)
        return weights(trainer)


def test_a_sharded_checkpoint_is_adapted_and_plain_peft_loads_what_was_saved(tmp_path: Path) -> None:
    base = tiny_model("llama", torch.float64)
    base.save_pretrained(tmp_path / "base", max_shard_size="40KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    saved, wanted = tmp_path / "saved", tmp_path / "wanted"
    staged, _ = run_processes(save_after_training, 2, str(tmp_path / "base"), str(saved))
    expected = save_after_training(0, str(tmp_path / "base"), None)
    assert list(staged) == list(expected)
    assert all(float((staged[key] - expected[key]).abs().max()) < TOLERANCE for key in expected)

    truth = FromCheckpoint(str(tmp_path / "base"))
    truth.configure_model()
    truth.load_state_dict(staged)
    truth.model.save_pretrained(str(wanted))  # by peft, of the whole model
    files = {path.relative_to(wanted) for path in wanted.rglob("*") if path.is_file()}
    assert {path.relative_to(saved) for path in saved.rglob("*") if path.is_file()} == files
    for folder in ("", "second"):
        tensors, of_peft = (load_file(place / folder / "adapter_model.safetensors") for place in (saved, wanted))
        assert tensors.keys() == of_peft.keys()
        assert all(torch.equal(tensors[key], of_peft[key]) for key in of_peft)
        config, of_peft = (_sorted(place / folder / "adapter_config.json") for place in (saved, wanted))
        assert config == of_peft

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    loaded = PeftModel.from_pretrained(base, saved / "second").double().eval()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        difference = loaded(input_ids=ids).logits - truth.model.eval()(input_ids=ids).logits
    assert float(difference.abs().max()) < TOLERANCE


def _sorted(path: Path) -> dict[str, Any]:
    """A config; the order of its lists, which peft keeps as sets, does not matter."""
    entries = json.loads(path.read_text()).items()
    return {key: sorted(value) if isinstance(value, list) else value for key, value in entries}


def refused(rank: int) -> str:
    with pytest.raises(ValueError, match="peft's type PROMPT_TUNING") as error:
        fit(stages(2), Adapted(PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")), rows(5))
    return str(error.value)


def test_learned_prompts_are_refused_on_all_ranks() -> None:
    assert len(set(run_processes(refused, 2))) == 1
