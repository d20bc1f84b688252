"""Loss and gradients of a head that runs slice by slice equal those of the whole model, and no logits are kept."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.float64 import float64_throughout
from support.staged_run import Result, largest_difference, make_stages, run_stages, run_whole
from support.tiny_models import VOCAB_SIZE, tiny_batch, tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from lightning_seq1f1b.models.sliced_head import SlicedHead
from lightning_seq1f1b.models.split import cut
from lightning_seq1f1b.models.stage import make_stages as make_stages_of
from lightning_seq1f1b.runtime.batching import cut_batch
from lightning_seq1f1b.runtime.wide_gradients import WideGradients
from lightning_seq1f1b.schedule import logits
from lightning_seq1f1b.schedule.spans import spans

TOLERANCE = 1e-10
ROWS = 2


@pytest.fixture(autouse=True)
def slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every chunk is sliced, to four tokens of two rows at most; the tokens of each slice that has run."""
    monkeypatch.setattr(logits, "SLICED_FROM", 0.0)
    monkeypatch.setattr(logits, "CPU_SLICE", 4.0 * 4 * ROWS * VOCAB_SIZE)
    lengths: list[int] = []
    loss = SlicedHead._loss

    def noted(self: SlicedHead, trunk_output: Any, hidden: Tensor, arguments: Any) -> Tensor:
        lengths.append(hidden.shape[1])
        return loss(self, trunk_output, hidden, arguments)

    monkeypatch.setattr(SlicedHead, "_loss", noted)
    return lengths


def compare(model: PreTrainedModel, batch: dict[str, Tensor] | None = None, **how: Any) -> float:
    batch = tiny_batch(ROWS) if batch is None else batch
    with float64_throughout():
        truth = run_whole(model, batch)
        return largest_difference(run_stages(make_stages(model), batch, **how), truth)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "cohere", "granite", "opt", "bloom", "phi3", "gpt_oss"])
def test_loss_and_gradients_equal(family: str, tied: bool, slices: list[int]) -> None:
    """Also with soft-caps (Gemma 2), scales (Cohere, Granite), and layers that are owned further down (OPT)."""
    assert compare(tiny_model(family, tie_word_embeddings=tied)) < TOLERANCE
    # Chunks of 7, 13, 2, 15 and 11 tokens; the last is first to have its backward.
    assert slices == [4, 4, 3, 4, 4, 4, 3, 2, 4, 4, 4, 1, 4, 3]


def test_one_stage_with_tied_embeddings(slices: list[int]) -> None:
    model, batch = tiny_model("llama", tie_word_embeddings=True), tiny_batch(ROWS)
    with float64_throughout():
        staged = run_stages(make_stages(model, [range(4)]), batch)
        assert largest_difference(staged, run_whole(model, batch)) < TOLERANCE
    assert slices


def test_microbatches_of_different_rows_and_a_split_backward(slices: list[int]) -> None:
    assert compare(tiny_model("llama"), tiny_batch(3), num_microbatches=2, split=True) < TOLERANCE
    assert slices


def adapted(**config: Any) -> PreTrainedModel:
    model = tiny_model("llama")
    options = {"r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"], **config}
    return get_peft_model(model, LoraConfig(**options)).double().get_base_model()


@pytest.mark.parametrize("split", [False, True], ids=["whole backward", "split backward"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["v_proj", "lm_head"], "use_dora": True},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=["frozen head", "adapter", "DoRA", "saved whole"],
)
def test_adapters(config: dict[str, Any], split: bool, slices: list[int]) -> None:
    model = adapted(**config)
    assert compare(model, split=split) < TOLERANCE
    assert slices
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert any("lm_head" in name for name in frozen)


def test_a_frozen_trunk(slices: list[int]) -> None:
    model = tiny_model("llama").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    batch = tiny_batch(ROWS)
    with float64_throughout():
        truth = run_whole(model, batch)
        [stage] = make_stages(model, [range(4)])
        state = stage.open(microbatch := cut_batch(batch, 1, spans([30, 18]))[0], training=True)
        for chunk in microbatch.chunks:
            assert not stage.forward(chunk, None, state).requires_grad
        assert [state.seed(chunk) for chunk in (1, 0)] == [None, None]
    gradients = {name: parameter.grad for name, parameter in stage.model.named_parameters()}
    assert largest_difference(Result(state.result()["loss"], gradients), truth) < TOLERANCE
    assert slices


def with_regulariser(
    logits: Tensor, labels: Tensor, shift_labels: Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any
) -> Tensor:
    """Cross-entropy and a pull of every token's partition function to 1: another sum over tokens."""
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shift_labels is None else shift_labels
    counts = targets != -100
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    partition = logits.logsumexp(-1)[counts].square().sum()
    return (loss + 0.1 * partition) / (counts.sum() if num_items_in_batch is None else num_items_in_batch)


def test_a_loss_of_the_users(slices: list[int]) -> None:
    model = tiny_model("llama")
    plain = run_whole(model, tiny_batch(ROWS)).loss
    model.loss_function = with_regulariser
    assert abs(run_whole(model, tiny_batch(ROWS)).loss - plain) > 0.1
    assert compare(model) < TOLERANCE
    assert slices


def test_chunks_without_a_supervised_token(slices: list[int]) -> None:
    batch = tiny_batch(ROWS)
    batch["labels"][:, :25] = -100
    assert compare(tiny_model("llama"), batch) < TOLERANCE
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    result = run_stages(make_stages(tiny_model("llama")), nothing)
    assert result.loss == 0
    assert not any(gradient is not None and torch.any(gradient) for gradient in result.gradients.values())
    assert slices


def evaluate(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    [stage] = make_stages(model, [range(4)])
    state = stage.open(microbatch := cut_batch(batch, 1, spans([30, 18]))[0], training=False)
    for chunk in microbatch.chunks:
        stage.forward(chunk, None, state)
    return state.result()["loss"]


def test_without_gradients_the_loss_is_there_after_the_forward(slices: list[int]) -> None:
    model, batch = tiny_model("gemma2"), tiny_batch(ROWS)
    with float64_throughout():
        wanted = run_whole(model, batch).loss
        with torch.no_grad():
            assert abs(evaluate(model, batch) - wanted) < 1e-12
    assert slices


def test_recomputed_activations(slices: list[int]) -> None:
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    assert compare(model) < TOLERANCE
    assert slices


def hook_on_head(model: PreTrainedModel) -> None:
    model.lm_head.register_forward_hook(lambda *args: None)


def hook_on_weight(model: PreTrainedModel) -> None:
    model.lm_head.weight.register_hook(lambda gradient: 2 * gradient)


@pytest.mark.parametrize("hook", [hook_on_head, hook_on_weight])
def test_hooks_see_chunks(hook: Callable[[PreTrainedModel], None], slices: list[int]) -> None:
    [stage] = make_stages(tiny_model("llama"), [range(4)])
    hook(stage.model)
    state = stage.open(microbatch := cut_batch(tiny_batch(ROWS), 1, spans([30, 18]))[0], training=True)
    assert stage.forward(microbatch.chunks[0], None, state).ndim == 0
    assert not slices


def test_what_else_leads_back_to_parameters_keeps_the_chunk_whole(slices: list[int]) -> None:
    model = tiny_model("llama")
    model.config.output_hidden_states = True
    assert compare(model) < TOLERANCE
    assert slices == [7, 13, 2, 15, 11]


def error(result: Result, truth: Result) -> float:
    differences = [
        (result.gradients[name] - wanted).flatten() for name, wanted in truth.gradients.items() if wanted is not None
    ]
    return float(torch.cat(differences).square().mean().sqrt())


def test_low_precision_is_as_close_to_float32_as_one_device(monkeypatch: pytest.MonkeyPatch, slices: list[int]) -> None:
    monkeypatch.setattr(logits, "CPU_SLICE", 1.0)  # a token at a time
    model, batch = tiny_model("llama", torch.float32), tiny_batch(ROWS, 192)
    truth = run_whole(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        whole, staged = run_whole(model, batch), run_stages(make_stages(model), batch, [150, 42])
    assert error(staged, truth) < 1.2 * error(whole, truth)
    half = tiny_model("llama", torch.float32).to(torch.bfloat16)
    stages = make_stages(half)
    WideGradients(parameter for stage in stages for parameter in stage.model.parameters()).begin()
    whole, staged = run_whole(half, batch), run_stages(stages, batch, [150, 42])
    assert error(staged, truth) < 1.2 * error(whole, truth)
    assert set(slices) == {1}


class PeakBytes(TorchDispatchMode):
    """The most bytes of storages that operations have made and that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes = WeakIdKeyDictionary()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, (args, kwargs, result))
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._sizes[storage] = storage.nbytes()


def peak(length: int, vocab_size: int, *, slices_logits: bool) -> int:
    """Bytes beside weights and their gradients in one step of one stage, of one chunk; counted, not resident."""
    model = tiny_model("llama", torch.float32, vocab_size=vocab_size, num_hidden_layers=1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held = 2 * sum(parameter.nbytes for parameter in model.parameters())
    stage = make_stages_of(cut(model, [0], [range(1)]), slices_logits=slices_logits)[0]
    batch = tiny_batch(1, length)
    state = stage.open(microbatch := cut_batch(batch, 1, spans([length]))[0], training=True)
    with PeakBytes() as counted:
        output = stage.forward(microbatch.chunks[0], None, state)
        torch.autograd.backward([output], [state.seed(0)])
    return counted.peak - held


def test_memory_depends_on_a_slice_and_not_on_vocabulary_times_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2.0**20
    monkeypatch.setattr(logits, "CPU_SLICE", size)
    with_few_logits = [peak(length, VOCAB_SIZE, slices_logits=False) for length in (512, 1024)]
    for vocab_size in (8192, 16384):
        for length, rest in zip((512, 1024), with_few_logits, strict=True):
            logits_of_chunk = 4 * length * vocab_size
            assert logits_of_chunk >= 16 * size
            # The softmax of a slice, the gradient of its logarithm and that of the logits; gradients of the embedding.
            assert peak(length, vocab_size, slices_logits=True) < rest + 3.2 * size + 4 * 32 * vocab_size
            assert peak(length, vocab_size, slices_logits=False) > rest + 2 * logits_of_chunk


RESIDENT = """
import torch
from benchmarks.sliced_logits import Head

def resident(what):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(what))

torch.set_num_threads(1)
head = Head(128 * 1024, 64, torch.float32)
head.slices(16)()
run = head.slices(8192)
with open("/proc/self/clear_refs", "w") as clear:
    clear.write("5")  # the peak starts again at what is resident now
before = resident("VmRSS")
run()
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_8192_tokens_with_a_vocabulary_of_128k_take_less_than_300_mb() -> None:
    """What the process grows by beside weights, their gradients and hidden states; the logits alone would be 4.3 GB."""
    # A fixed threshold, so that what is freed goes back to the system at once instead of being kept by malloc.
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 300e6


def test_reference_counting_frees_everything_a_chunk_has_left(slices: list[int]) -> None:
    """A cycle would hold activations until some later collection."""
    [stage] = make_stages(tiny_model("llama"), [range(4)])
    gc.collect()
    gc.disable()
    try:
        state = stage.open(microbatch := cut_batch(tiny_batch(ROWS), 1, spans([48]))[0], training=True)
        output = stage.forward(microbatch.chunks[0], None, state)
        held = weakref.ref(output), weakref.ref(state)
        torch.autograd.backward([output], [state.seed(0)])
        state.close()
        del output, state
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()
    assert slices
