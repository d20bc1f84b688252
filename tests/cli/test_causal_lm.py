"""The ready module: what it trains, what it logs, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from support.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from support.tiny_models import tiny_batch, tiny_config, tiny_model
from torch.utils.data import DataLoader

from lightning_seq1f1b import CausalLM, LongDocuments

TINY = {"model_type": "llama", "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}


def trainer(**options) -> L.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(accelerator="cpu", devices=1, **{**quiet, **options})


def loader(num_batches: int = 4, rows: int = 2) -> DataLoader:
    return DataLoader([tiny_batch(rows, 16, seed) for seed in range(num_batches)], batch_size=None)


def test_a_pretrained_model_is_loaded_in_torchs_default_dtype(tmp_path):
    model = tiny_model("llama", torch.bfloat16)
    model.save_pretrained(tmp_path)
    module = CausalLM(str(tmp_path))
    module.configure_model()
    assert module.model.training
    for name, parameter in module.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).float())


def test_recomputation_runs_layers_twice_and_changes_no_gradient():
    gradients, runs = [], []
    for recompute in (False, True):
        module = CausalLM(config=TINY, recompute=recompute)
        module.configure_model()
        calls = []
        for layer in module.model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        module.model(**tiny_batch(2, 16), use_cache=False).loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in module.parameters()]))
        runs.append(len(calls))
    assert runs == [2, 4]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("form", ["dict", "directory"])
def test_a_model_from_scratch_depends_on_its_seed_only(tmp_path, form):
    config = TINY
    if form == "directory":
        tiny_config("gpt2").save_pretrained(tmp_path)
        config = str(tmp_path)
    weights = []
    for seed in (0, 0, 1):
        state = torch.get_rng_state()
        module = CausalLM(config=config, seed=seed)
        module.configure_model()
        assert torch.equal(torch.get_rng_state(), state), "making the model must not move the process's random state"
        weights.append(torch.cat([parameter.flatten() for parameter in module.parameters()]))
        torch.rand(1)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_configure_model_makes_the_model_once():
    module = CausalLM(config=TINY)
    module.configure_model()
    model = module.model
    module.configure_model()
    assert module.model is model


def test_it_trains_like_a_plain_loop():
    """Losses and weights equal those of torch alone: AdamW on two groups, warm-up, cosine, clipping by the Trainer."""
    module = CausalLM(config=TINY, learning_rate=1e-2, weight_decay=0.1, warmup_steps=2)
    losses = []

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(trainer.callback_metrics["train_loss"].item())

    trainer(max_epochs=1, gradient_clip_val=0.5, callbacks=[Keep()]).fit(module, loader())

    other = CausalLM(config=TINY)
    other.configure_model()
    model = other.model
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    matrices = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": norms, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1
    )
    expected = []
    for batch, factor in zip(loader(), (0.5, 1.0, 1.0, 0.5), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(module.model.get_parameter(name), parameter, atol=1e-6, rtol=0)


def test_another_optimizer_keeps_its_own_rate_and_decay_but_not_on_norms():
    module = CausalLM(config=TINY, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.3, weight_decay=0.2))
    run = trainer(max_epochs=1)
    run.fit(module, loader(2))
    matrices, norms = run.optimizers[0].param_groups
    assert matrices["initial_lr"] == norms["initial_lr"] == 0.3
    assert (matrices["weight_decay"], norms["weight_decay"]) == (0.2, 0.0)
    assert len(norms["params"]) == 5  # two layers of two norms, and the last


def test_frozen_parameters_are_left_out():
    module = CausalLM(config=TINY)
    module.configure_model()
    module.model.get_input_embeddings().requires_grad_(False)
    run = trainer(max_epochs=1)
    run.fit(module, loader(1))
    held = {id(parameter) for group in run.optimizers[0].param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


@pytest.mark.parametrize("command", ["validate", "test"])
def test_evaluation_weighs_tokens_alike_over_unequal_batches(command):
    module = CausalLM(config=TINY)
    batches = [tiny_batch(1, 40, 0, ignored=0.9), tiny_batch(3, 12, 1, ignored=0.0), tiny_batch(2, 9, 2, ignored=0.5)]
    (metrics,) = getattr(trainer(), command)(module, DataLoader(batches, batch_size=None), verbose=False)
    nll = tokens = 0.0
    with torch.no_grad():
        for batch in batches:
            logits = module.model(batch["input_ids"]).logits[:, :-1].double()
            target = batch["labels"][:, 1:]
            nll += torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum").item()
            tokens += (target != -100).sum().item()
    name = {"validate": "val", "test": "test"}[command]
    assert set(metrics) == {f"{name}_loss", f"{name}_perplexity"}
    assert metrics[f"{name}_loss"] == pytest.approx(nll / tokens, rel=1e-5)
    assert metrics[f"{name}_perplexity"] == pytest.approx(torch.tensor(nll / tokens).exp().item(), rel=1e-5)


def test_predict_gives_each_batchs_loss_and_perplexity():
    module = CausalLM(config=TINY)
    outputs = trainer().predict(module, loader(2))
    for output, batch in zip(outputs, loader(2), strict=True):
        loss = module.model(**batch).loss.detach()
        torch.testing.assert_close(output, {"loss": loss, "perplexity": loss.exp()})


def test_a_checkpoint_loads_into_an_equal_module_by_safe_loading(tmp_path):
    module = CausalLM(config=TINY, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    run = trainer(max_epochs=1)
    run.fit(module, loader(1))
    run.save_checkpoint(tmp_path / "a.ckpt")
    loaded = CausalLM.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True, seed=5)
    assert loaded.hparams["config"] == TINY
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "got neither"),
        ({"model_name_or_path": "a", "config": TINY}, "got both"),
        ({"config": {"hidden_size": 3}}, r"config needs the key 'model_type', .* it has \['hidden_size'\]"),
        ({"config": TINY, "learning_rate": -1.0}, "learning_rate must not be negative, got -1.0"),
        ({"config": TINY, "weight_decay": -1.0}, "weight_decay must not be negative, got -1.0"),
        ({"config": TINY, "warmup_steps": -1}, "warmup_steps must not be negative, got -1"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CausalLM(**arguments)


def documents(tmp_path: Path, length: int) -> LongDocuments:
    (tmp_path / "a.txt").write_text("some text")
    return LongDocuments(str(tmp_path / "a.txt"), save_byte_tokenizer(tmp_path / "tokenizer"), sequence_length=length)


def test_a_tokenizer_beyond_the_models_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"the tokenizer has {VOCAB_SIZE} tokens but the model only 97"):
        trainer(max_epochs=1).fit(CausalLM(config=TINY), documents(tmp_path, 16))


def test_rows_beyond_the_models_positions_are_refused(tmp_path):
    config = {**TINY, "vocab_size": VOCAB_SIZE}
    with pytest.raises(ValueError, match=r"sequence_length is 65, but the model has 64 positions"):
        trainer(max_epochs=1).fit(CausalLM(config=config), documents(tmp_path, 65))


def test_remote_code_is_refused_unless_asked(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "model_type": "of_ones_own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'of_ones_own'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    with pytest.raises(ValueError, match=r"contains custom code(.|\n)*`trust_remote_code=True`"):
        CausalLM(str(tmp_path)).configure_model()
    module = CausalLM(str(tmp_path), trust_remote_code=True)
    module.configure_model()
    assert type(module.model).__module__.startswith("transformers_modules")
