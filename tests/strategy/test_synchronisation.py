"""How often a training step reads values back from the device: not once for a chunk or microbatch, or for a trace."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.fitting import TWO_STAGES, everywhere, fit, stages
from support.training import FineTune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

_OPS = torch.ops.aten
READING = {
    _OPS._local_scalar_dense.default,
    _OPS.nonzero.default,
    _OPS.masked_select.default,
    _OPS._unique2.default,
    _OPS.unique_consecutive.default,
    _OPS.unique_dim.default,
    _OPS.equal.default,
    _OPS.repeat_interleave.Tensor,
    _OPS.bincount.default,
}
"""Operations whose result, or its shape, depends on values: on an accelerator each waits for all work before it."""

COPYING = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy}
"""Methods that copy from the device, but do not show as an operation where the tensor is on the CPU."""


class Reading(TorchDispatchMode):
    """Counts such operations."""

    def __init__(self, seen: Counter) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [index for index in args[1] if index is not None] if func is _OPS.index.Tensor else []
        if func in READING or any(index.dtype in (torch.bool, torch.uint8) for index in masks):
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Copying(TorchFunctionMode):
    """Counts such methods."""

    def __init__(self, seen: Counter) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COPYING:
            self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(seen: Counter) -> Iterator[None]:
    with Reading(seen), Copying(seen):
        yield


class Counted(FineTune):
    """Counts what the call of the model reads back in every training step."""

    def __init__(self) -> None:
        super().__init__(num_hidden_layers=2)
        self.reads: list[Counter] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.reads.append(Counter())
        with counting(self.reads[-1]):
            return self.model(**batch).loss


def batch(kind: str) -> dict[str, torch.Tensor]:
    """Three rows, of which some are as `kind` says."""
    ids = torch.randint(3, 90, (3, 32), generator=torch.Generator().manual_seed(0))
    row = {"input_ids": ids, "labels": ids.clone()}
    lengths = torch.tensor([32, 21, 17])
    real = torch.arange(32)[None] < lengths[:, None]
    if kind == "padded at the left":
        real = real.flip(1)
        row["labels"][torch.arange(3), 32 - lengths] = -100
    if kind.startswith("padded"):
        return {**row, "attention_mask": real.long(), "labels": row["labels"].masked_fill(~real, -100)}
    if kind == "packed":
        positions = torch.arange(32).expand(3, 32) % torch.tensor([[32], [20], [11]])
        return {**row, "position_ids": positions, "labels": row["labels"].masked_fill(positions == 0, -100)}
    return row


BATCHES = ("plain", "padded", "padded at the left", "packed")
CUTS = ((1, 1), (3, 4))
"""Microbatches and chunks."""


def reads(kind: str, cut: tuple[int, int], trace: bool, where: Any) -> list[dict[str, int]]:
    """What each of three steps reads back on this rank."""
    microbatches, chunks = cut
    module, loader = Counted(), DataLoader([batch(kind)] * 3, batch_size=None)
    where = stages(where.devices, num_microbatches=microbatches, num_chunks=chunks, trace=trace)
    fit(where, module, loader, max_epochs=1)
    return [dict(seen) for seen in module.reads]


CASES = tuple(
    functools.partial(reads, kind, cut, trace)
    for kind in BATCHES
    for cut in CUTS
    for trace in ((False, True) if kind == "plain" else (False,))
)


def case(kind: str, cut: tuple[int, int], trace: bool = False) -> functools.partial:
    (found,) = [each for each in CASES if each.args == (kind, cut, trace)]
    return found


@pytest.mark.behaviour(51)
@pytest.mark.parametrize("kind", BATCHES)
def test_neither_chunks_nor_microbatches_read_from_the_device(kind: str) -> None:
    """The first step also compares plans, and asks for the format of messages; every later one counts."""
    every = everywhere(CASES, TWO_STAGES)
    for rank in range(2):
        few = every[case(kind, CUTS[0])][rank][1:]
        assert few[0] == few[1]
        assert sum(few[0].values()) > 0, "the count sees what there is: batches are compared"
        for cut in CUTS[1:]:
            assert every[case(kind, cut)][rank][1:] == few


@pytest.mark.behaviour(51)
def test_a_trace_reads_nothing() -> None:
    every = everywhere(CASES, TWO_STAGES)
    for cut in CUTS:
        assert every[case("plain", cut, True)] == every[case("plain", cut)]


def test_the_count_sees_every_way_to_read() -> None:
    tensor, seen = torch.arange(3), Counter()
    with counting(seen):
        int(tensor.sum())
        bool(tensor.any())
        tensor.tolist()
        tensor.nonzero()
        tensor[tensor > 1]
        tensor.cpu()
        torch.equal(tensor, tensor)
    assert sum(seen.values()) >= 7
