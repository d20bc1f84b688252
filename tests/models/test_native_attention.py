"""Models on the native kernels: the same numbers as without them, and on the runtime's own buffers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.float64 import float64_throughout
from support.staged_run import CHUNK_LENGTHS, largest_difference, make_stages, run_stages
from support.tiny_models import tiny_batch, tiny_model
from torch import Tensor

from lightning_seq1f1b.ops import attention, kernels, native
from lightning_seq1f1b.ops.attended import Attended
from lightning_seq1f1b.ops.kernels import MERGED, NATIVE, Kernel
from lightning_seq1f1b.ops.options import Options
from lightning_seq1f1b.runtime.kv_buffer import KVBuffer

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2", "gemma2", "gpt_oss")


def use(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    """Leave no other kernel to choose."""
    assert native.available(), native.reason()
    for module in (kernels, attention):
        monkeypatch.setattr(module, "fast_kernels", lambda device_type: (kernel,))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_equals_that_of_plain_torch(
    family: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = tiny_model(family, dtype), tiny_batch()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :9] = 0
    calls = []

    def counted(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        calls.append(key)
        return NATIVE.forward(query, key, value, options)

    with float64_throughout() if dtype == torch.float64 else nullcontext():
        use(monkeypatch, replace(NATIVE, forward=counted))
        by_native = run_stages(make_stages(model), batch)
        use(monkeypatch, MERGED)
        by_torch = run_stages(make_stages(model), batch)
    assert len(calls) == model.config.num_hidden_layers * len(CHUNK_LENGTHS)
    assert largest_difference(by_native, by_torch) < tolerance


def test_the_kernels_work_on_the_buffers_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are read from the KV buffer and their gradients added to its accumulators, without a copy."""
    read, added_to, buffers, accumulators = set[int](), set[int](), set[int](), set[int]()
    write, accumulator = KVBuffer._write, KVBuffer._accumulator

    def storages(*tensors: Tensor) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.device.type == "cpu"}

    def watched_write(self: KVBuffer, slot: int, *written: Any) -> None:
        write(self, slot, *written)
        buffers.update(storages(self._values[slot]))

    def watched_accumulator(self: KVBuffer, slot: int) -> Tensor:
        found = accumulator(self, slot)
        accumulators.update(storages(found))
        return found

    def forward(query: Tensor, key: Tensor, value: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        read.update(storages(key, value))
        return NATIVE.forward(query, key, value, options)

    def backward(gradient: Tensor, attended: Attended, key: Tensor, value: Tensor, options: Options) -> Tensor:
        added_to.update(storages(key, value))
        return NATIVE.backward(gradient, attended, key, value, options)

    monkeypatch.setattr(KVBuffer, "_write", watched_write)
    monkeypatch.setattr(KVBuffer, "_accumulator", watched_accumulator)
    use(monkeypatch, replace(NATIVE, forward=forward, backward=backward))
    with float64_throughout():
        run_stages(make_stages(tiny_model("llama")), tiny_batch())
    assert buffers
    assert read == buffers
    assert accumulators
    assert added_to == accumulators
