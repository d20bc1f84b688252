"""Every schedule on any number of ranks has the losses and all gradients of one device, in double precision."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from support.exact_training import Run, largest_difference, train, train_all
from support.processes import ProcessFailedError, run_processes

TOLERANCE = 1e-10

ONE_STAGE = (("gpipe", 3), ("1f1b", 1), ("zb1p", 1), ("seq1f1b", 4), ("seq1f1b_zb", 4))
TWO_STAGES = (("interleaved_1f1b", 1), ("interleaved_seq1f1b", 4), ("interleaved_seq1f1b_zb", 4))
"""Schedules and numbers of chunks."""

Case = tuple[str, tuple[tuple[str, Any], ...]]
"""A model, and the arguments of the strategy."""


def case(model: str, schedule: str, num_chunks: int, virtual_stages: int, **arguments: Any) -> Case:
    arguments = {"schedule": schedule, "num_chunks": num_chunks, "virtual_stages": virtual_stages, **arguments}
    return model, tuple(arguments.items())


def family(model: str, *, split_only: bool = False) -> list[Case]:
    """Every schedule, without and with virtual stages."""
    cases = [case(model, schedule, num_chunks, 1) for schedule, num_chunks in ONE_STAGE]
    cases += [case(model, schedule, num_chunks, 2) for schedule, num_chunks in TWO_STAGES]
    return [each for each in cases if not split_only or dict(each[1])["schedule"].endswith(("zb", "zb1p"))]


FAMILY = (*family("tied"), *family("lora"), *family("gpt2", split_only=True))
FEWER_CHUNKS_THAN_RANKS = case("tied", "interleaved_seq1f1b_zb", 2, 2)
KNOBS = (
    case("tied", "interleaved_seq1f1b_zb", 4, 2, memory_knob=2, partition=0.5),
    case("tied", "interleaved_seq1f1b_zb", 4, 2, activation_cap=8, partition="even"),
    case("lora", "seq1f1b_zb", 4, 1, num_microbatches=1, memory_knob=2),
    case("tied", "seq1f1b", 4, 1, activation_cap=4, partition=(5, 11, 3, 14)),
)
ROUTERS = (
    case("routers", "interleaved_seq1f1b_zb", 3, 2, num_microbatches=1),
    case("routers", "interleaved_seq1f1b", 4, 1, num_microbatches=1, partition=(5, 11, 3, 14)),
)
ONE_RANK = (
    *(case(name, schedule, chunks, 2) for name in ("tied", "lora", "gpt2") for schedule, chunks in TWO_STAGES),
    *ROUTERS,
    case("tied", "interleaved_seq1f1b", 3, 8),
)
CASES = {
    1: ONE_RANK,
    2: (*FAMILY, *KNOBS, *ROUTERS),
    3: (*FAMILY, FEWER_CHUNKS_THAN_RANKS, *ROUTERS),
    4: (*FAMILY, FEWER_CHUNKS_THAN_RANKS),
}
"""What is trained, by the number of ranks."""


@functools.cache
def one_device(model: str) -> Run:
    return train(model, None, {})


@functools.cache
def trained(num_ranks: int) -> list[list[Run]] | ProcessFailedError:
    """What each rank showed in every case; all cases share one start of the processes. An error is kept, too."""
    cases = [(model, dict(given)) for model, given in CASES[num_ranks]]
    try:
        return run_processes(train_all, num_ranks, num_ranks, cases)
    except ProcessFailedError as error:
        return error


def named(value: int | Case) -> str:
    if isinstance(value, int):
        return f"{value} ranks"
    model, given = value
    return ", ".join([model, *(str(value) for _, value in given)])


@pytest.mark.behaviour(1)
@pytest.mark.parametrize(
    ("num_ranks", "each"), [(num_ranks, each) for num_ranks, cases in CASES.items() for each in cases], ids=named
)
def test_losses_and_gradients_equal_one_device(num_ranks: int, each: Case) -> None:
    by_rank, truth = trained(num_ranks), one_device(each[0])
    if isinstance(by_rank, ProcessFailedError):
        raise by_rank
    assert all(float(gradient.abs().max()) > 0 for step in truth.gradients for gradient in step.values())
    place = CASES[num_ranks].index(each)
    assert largest_difference([runs[place] for runs in by_rank], truth) < TOLERANCE
