"""The promise: an unchanged module, trained over stages, has the losses, metrics and weights of one device."""

import functools

import pytest
import torch
from support.processes import run_processes
from support.training import Scenario, assert_same, train, train_all

DTYPES = {"float64": (torch.float64, "64-true", 1e-6), "float32": (torch.float32, "32-true", 5e-6)}
CHUNKS = [(1, "even"), (3, "even"), (5, "even"), (1, "balanced"), (3, "balanced"), (5, "balanced")]


def scenario(dtype, *, padded, chunks=1, partition="even", **strategy):
    torch_dtype, precision, _ = DTYPES[dtype]
    return Scenario(
        module={"dtype": torch_dtype},
        trainer={"precision": precision, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
        strategy={"num_chunks": chunks, "partition": partition, **strategy},
        padded=padded,
    )


@functools.cache
def one_device(dtype, padded):
    return train(scenario(dtype, padded=padded), None)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("padded", [False, True])
def test_equals_one_device(num_stages, dtype, padded):
    expected = one_device(dtype, padded)
    assert expected.losses[0] > expected.losses[-1] > 0  # it does train
    scenarios = [scenario(dtype, padded=padded, chunks=chunks, partition=partition) for chunks, partition in CHUNKS]
    by_rank = run_processes(train_all, num_stages, scenarios, num_stages)
    for case in range(len(scenarios)):
        assert_same([outcomes[case] for outcomes in by_rank], expected, DTYPES[dtype][2])
