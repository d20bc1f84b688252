"""What layers keep, as counted without memory, against what autograd and the split backward really keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support.tiny_models import tiny_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from lightning_seq1f1b.models.shape import model_shape
from lightning_seq1f1b.models.split import cut
from lightning_seq1f1b.models.stage import make_stages
from lightning_seq1f1b.runtime.batching import cut_batch
from lightning_seq1f1b.runtime.split_backward import DeferredGradients, SplitBackward
from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.estimate import Training, unit_sizes
from lightning_seq1f1b.schedule.spans import spans

ROWS, CHUNKS = 2, spans([96, 32])
LAYERS = (2, 2)


def config_of(family: str) -> PreTrainedConfig:
    """Wide enough for what grows with the width to be most."""
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 500}
    if family == "gpt2":
        del sizes["intermediate_size"], sizes["head_dim"]
    return tiny_config(family, **sizes)


class Kept:
    """Storages that are kept, each once, without those of the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        self.tensors: list[Tensor] = []

    def add(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self._seen:
            self._seen.add(tensor.untyped_storage().data_ptr())
            self.tensors.append(tensor)
        return tensor

    def nbytes(self, without: set[int] = frozenset()) -> int:
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        return sum(storage.nbytes() for storage in storages if storage.data_ptr() not in without)

    @contextmanager
    def saving(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor):
            yield


def run_unit(config: PreTrainedConfig, dtype: torch.dtype, index: int) -> dict[str, float]:
    """Bytes that chunk 0 of a microbatch holds on one of two stages after F, and after I, and those of its buffers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    stage = make_stages(cut(model, [index], [range(2), range(2, 4)]))[index]
    ids = torch.randint(3, 90, (ROWS, CHUNKS[-1].stop))
    microbatch = cut_batch({"input_ids": ids, "labels": ids}, 1, CHUNKS)[0]
    state = stage.open(microbatch, training=True)
    hidden = None if index == 0 else torch.randn(ROWS, CHUNKS[0].length, 128, dtype=dtype).requires_grad_()
    kept, split = Kept(model), SplitBackward(stage.linears)
    with kept.saving(), split.deferring():
        output = stage.forward(microbatch.chunks[0], hidden, state)
    kept.add(output)
    if hidden is not None:
        kept.add(hidden)
    buffers = {
        tensor.untyped_storage().data_ptr() for buffer in state._buffers.values() for tensor in buffer._values.values()
    }
    written = sum(buffer.nbytes() for buffer in state._buffers.values())
    store, deferred = DeferredGradients(), Kept(model)
    with split.deferring(store):
        torch.autograd.backward([output], [torch.randn_like(output)])
    for use in store._kept:
        deferred.add(use.value)
        deferred.add(use.gradient)
    return {"activations": kept.nbytes(buffers), "deferred": deferred.nbytes(), "keys_values": written}


def predicted(shape: ModelShape, dtype: torch.dtype, index: int) -> dict[str, float]:
    sizes = unit_sizes(shape, LAYERS, CHUNKS, Training(rows=ROWS, activation_bytes=dtype.itemsize))
    return {name: getattr(sizes, name)[index][0] for name in ("activations", "deferred", "keys_values")}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index", [0, 1])
def test_units_hold_what_was_predicted(family: str, dtype: torch.dtype, index: int) -> None:
    config = config_of(family)
    measured, wanted = run_unit(config, dtype, index), predicted(model_shape(config), dtype, index)
    assert wanted["keys_values"] == measured["keys_values"]
    for name in ("activations", "deferred"):
        assert wanted[name] == pytest.approx(measured[name], rel=0.1), name


def test_layers_of_every_kind_are_counted_as_they_are() -> None:
    """Recurrent layers keep no keys and attend to nothing; the others of the model do."""
    recurrent, attending, *_ = model_shape(tiny_config("qwen3_next")).layers
    assert (recurrent.window, recurrent.pair_width, recurrent.kv_width) == (0, 0, 0)
    assert (attending.window, attending.pair_width, attending.kv_width) == (None, 4 * 16, 2 * 16)
    assert recurrent.matrices > attending.matrices


def test_windows_are_those_of_each_layer() -> None:
    shape = model_shape(tiny_config("gemma2"))
    assert [layer.window for layer in shape.layers] == [11, None, 11, None]
    assert len({replace(layer, window=None) for layer in shape.layers}) == 1


def test_experts_count_as_often_as_a_token_is_sent_to_them() -> None:
    shape = model_shape(tiny_config("mixtral"))
    layer = shape.layer(0)
    projections = 2 * 32 * (4 + 2) * 8
    expert = 3 * 32 * 48
    router = 4 * 32
    assert layer.parameters == projections + 4 * expert + router
    assert layer.matrices == projections + 2 * expert + router
    assert layer.joint_matrices == 2 * expert + router
    assert (layer.linear_inputs, layer.linear_outputs) == (32 + 32, 2 * 48 + 0 * 32)


def test_keys_and_values_of_different_sizes_are_seen() -> None:
    """DeepSeek keeps what keys and values are made of (kv_lora_rank and rotary keys), and attends with all heads."""
    config = tiny_config(
        "deepseek_v3", kv_lora_rank=20, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, head_dim=8, n_group=1
    )
    for layer in model_shape(config).layers:
        assert layer.kv_width == 20 + 8
        assert layer.pair_width == 4 * (24 + 8 + 16)


def test_without_a_model_the_sizes_stand_alone() -> None:
    config = tiny_config("llama")
    config.num_attention_heads = 5  # which does not divide what it has to
    config.rope_parameters = {"rope_type": "no such"}
    shape = model_shape(config)
    assert shape.layers == ()
    assert shape.layer(0).pair_width == 5 * 16


def test_counting_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    model_shape(tiny_config("qwen3"))
    assert torch.equal(torch.get_rng_state(), before)
