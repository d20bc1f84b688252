"""A cut model as the executor's stage: memory, adapters, evaluation, and what it leaves alone."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.float64 import float64_throughout
from support.staged_run import LAYER_RANGES, largest_difference, make_stages, run_stages, run_whole
from support.tiny_models import tiny_batch, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from lightning_seq1f1b.models.facade import install
from lightning_seq1f1b.models.split import cut
from lightning_seq1f1b.models.stage import make_stages as make_stages_of
from lightning_seq1f1b.runtime.batching import cut_batch
from lightning_seq1f1b.schedule.spans import spans


def adapted(**options: Any) -> PreTrainedModel:
    """The model inside a peft model, with LoRA on all linear layers and a frozen base."""
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM", **options
    )
    torch.manual_seed(0)
    return get_peft_model(tiny_model("llama"), config).to(torch.float64).base_model.model


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}], ids=["adapters", "and a trained head"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_adapters_go_with_their_layers(options: dict[str, Any], num_ranks: int) -> None:
    model, batch = adapted(**options), tiny_batch()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    with float64_throughout():
        truth = run_whole(model, batch)
        stages = make_stages(model, num_ranks=num_ranks)
        assert largest_difference(run_stages(stages, batch), truth) < 1e-10
    assert all(truth.gradients[name] is not None for name in trained)
    for stage in stages:
        layers = {name.split(".")[2] for name, _ in stage.model.named_parameters() if "lora_" in name}
        on_rank = [other.layers for other in stages if other.model is stage.model]
        assert layers == {str(index) for indices in on_rank for index in indices}


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_after_the_backward_nothing_is_alive(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers, their gradients, hidden states and autograd graphs are gone without the garbage collector's help."""
    alive: list[weakref.ref[Any]] = []

    def watched(allocate: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        alive.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    stages = make_stages(tiny_model("llama"), num_ranks=num_ranks)
    hooks = [
        module.register_forward_hook(
            lambda module, args, output: alive.append(weakref.ref(output)) if isinstance(output, Tensor) else None
        )
        for model in {id(stage.model): stage.model for stage in stages}.values()
        for module in model.modules()
    ]
    run_stages(stages, tiny_batch())  # what is made once, by the library, is made now
    alive.clear()
    gc.collect()
    gc.disable()
    try:
        for name in ("empty", "zeros"):
            monkeypatch.setattr(torch, name, functools.partial(watched, getattr(torch, name)))
        result = run_stages(stages, tiny_batch())
        monkeypatch.undo()
        assert len(alive) > 100
        left = [found for reference in alive if (found := reference()) is not None]
        assert all(found is result.loss.untyped_storage() for found in left)
    finally:
        gc.enable()
        for hook in hooks:
            hook.remove()
    assert torch.isfinite(result.loss)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_evaluation_gives_the_loss_and_keeps_no_graph(family: str, num_ranks: int) -> None:
    model, batch = tiny_model(family).eval(), tiny_batch()
    with float64_throughout(), torch.inference_mode():
        expected = run_whole_without_gradients(model, batch)
        stages = make_stages(model, num_ranks=num_ranks)
        (microbatch,) = cut_batch(batch, 1, spans([7, 13, 28]))
        states = [stage.open(microbatch, training=False) for stage in stages]
        loss = torch.zeros((), dtype=torch.float64)
        for chunk in microbatch.chunks:
            hidden = None
            for stage, state in zip(stages, states, strict=True):
                hidden = stage.forward(chunk, hidden, state)
                assert hidden.grad_fn is None
            loss += hidden
    assert float((loss - expected).abs()) < 1e-12


def run_whole_without_gradients(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, use_cache=False).loss


def test_training_goes_on_after_an_evaluation_in_inference_mode() -> None:
    model, batch = tiny_model("llama"), tiny_batch()
    stages = make_stages(model)
    (microbatch,) = cut_batch(batch, 1, spans([20, 28]))
    with torch.inference_mode():
        state = stages[0].open(microbatch, training=False)
        for chunk in microbatch.chunks:
            stages[0].forward(chunk, None, state)
        state.close()
    with float64_throughout():
        assert largest_difference(run_stages(stages, batch), run_whole(model, batch)) < 1e-10


def test_a_last_stage_needs_labels() -> None:
    stage = make_stages(tiny_model("llama"), [range(4)])[0]
    (microbatch,) = cut_batch({"input_ids": tiny_batch()["input_ids"]}, 1, spans([48]))
    with pytest.raises(ValueError, match="without labels has no loss"):
        stage.forward(microbatch.chunks[0], None, stage.open(microbatch, training=True))


def test_it_runs_the_models_own_forward_behind_a_facade() -> None:
    model, batch = tiny_model("llama"), tiny_batch()
    with float64_throughout():
        truth = run_whole(model, batch)
        model.zero_grad(set_to_none=True)
        install(model, lambda _: pytest.fail("the facade ran"))
        (stage,) = make_stages_of(cut(model, [0], [range(4)])).values()
        assert largest_difference(run_stages([stage], batch), truth) < 1e-10


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_hooks_of_the_user_on_a_stages_first_and_last_layer_run(num_ranks: int) -> None:
    model, batch = tiny_model("llama"), tiny_batch()
    model.model.layers[1].register_forward_pre_hook(lambda layer, args: (args[0] * 2, *args[1:]))
    model.model.layers[2].register_forward_hook(lambda layer, args, output: output * 3)
    with float64_throughout():
        truth = run_whole(model, batch)
        assert largest_difference(run_stages(make_stages(model, num_ranks=num_ranks), batch), truth) < 1e-10


@pytest.mark.parametrize("tied", [False, True])
def test_every_module_runs_once_for_a_chunk_when_all_stages_are_on_one_rank(tied: bool) -> None:
    stages = make_stages(tiny_model("gpt2", tie_word_embeddings=tied), num_ranks=1)
    runs: Counter[str] = Counter()
    for name, module in stages[0].model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda *_, name=name: runs.update([name]))
    run_stages(stages, tiny_batch(), [20, 28])
    assert len(runs) > 20
    assert set(runs.values()) == {2}


def test_parts_of_a_cut_model_do_not_run_alone() -> None:
    model = make_stages(tiny_model("llama"), num_ranks=1)[0].model
    with pytest.raises(RuntimeError, match="runs as a whole only"):
        model.model(input_ids=tiny_batch()["input_ids"])


@pytest.mark.parametrize(("family", "transposed", "each"), [("llama", False, 7), ("gpt2", True, 4)])
def test_linears_of_each_stage_are_those_of_its_layers(family: str, transposed: bool, each: int) -> None:
    stages = make_stages(tiny_model(family, tie_word_embeddings=False), num_ranks=1)
    names = {module: name for name, module in stages[0].model.named_modules()}
    seen = []
    for stage in stages:
        kinds = {names[layer.module]: layer.transposed for layer in stage.linears}
        assert {number for name in kinds for number in name.split(".") if number.isdigit()} == set(
            map(str, stage.layers)
        )
        assert set(kinds.values()) == {transposed}
        seen += kinds
    assert len(seen) == len(set(seen)) == 4 * each


def test_received_hidden_states_are_not_written_to() -> None:
    """CTRL scales what it takes for embeddings in place."""
    stage = make_stages(tiny_model("ctrl"))[1]
    (microbatch,) = cut_batch(tiny_batch(), 1, spans([48]))
    hidden = torch.randn(2, 48, 32, dtype=torch.float64)
    before = hidden.clone()
    stage.forward(microbatch.chunks[0], hidden.requires_grad_(), stage.open(microbatch, training=True))
    assert torch.equal(hidden, before)


def test_padding_is_not_looked_for_in_chunks(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("gpt2", pad_token_id=0)
    batch = tiny_batch()
    batch["input_ids"][:, -1] = 0
    stages = make_stages(model)
    read = []

    class Watched(torch.Tensor):
        def __contains__(self, item: object) -> bool:
            read.append(item)
            return super().__contains__(item)

    (microbatch,) = cut_batch(batch, 1, spans([48]))
    chunk = microbatch.chunks[0]
    object.__setattr__(chunk, "input_ids", chunk.input_ids.as_subclass(Watched))
    stages[0].forward(chunk, None, stages[0].open(microbatch, training=True))
    assert not read


@pytest.mark.parametrize("index", range(3))
def test_index_and_number_of_stages(index: int) -> None:
    stage = make_stages_of(cut(tiny_model("llama"), [index], LAYER_RANGES))[index]
    assert (stage.index, stage.num_stages, stage.layers) == (index, 3, LAYER_RANGES[index])
