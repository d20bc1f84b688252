"""Training whose last stage computes logits in slices equals one device, with every kind of schedule."""

from __future__ import annotations

from typing import Any

import pytest
from support.exact_training import Run, largest_difference, train, train_all
from support.processes import run_processes
from support.tiny_models import VOCAB_SIZE

from lightning_seq1f1b.models.sliced_head import SlicedHead
from lightning_seq1f1b.schedule import logits

CASES = [
    ("tied", {"num_chunks": 3, "schedule": "seq1f1b"}),
    ("tied", {"num_chunks": 3, "schedule": "interleaved_seq1f1b_zb", "virtual_stages": 2}),
    ("lora", {"num_chunks": 2, "schedule": "seq1f1b_zb"}),
]


def train_in_slices(rank: int, devices: int, cases: list[tuple[str, dict[str, Any]]]) -> tuple[list[Run], int]:
    """What `train_all` gives, and how often a chunk was sliced."""
    logits.SLICED_FROM, logits.CPU_SLICE = 0.0, 4.0 * 5 * VOCAB_SIZE
    compute, count = SlicedHead.loss_and_gradient, [0]

    def counted(self: SlicedHead, *args: Any) -> Any:
        count[0] += 1
        return compute(self, *args)

    SlicedHead.loss_and_gradient = counted  # in a process of its own
    return train_all(rank, devices, cases), count[0]


@pytest.fixture(scope="module")
def staged() -> list[tuple[list[Run], int]]:
    return run_processes(train_in_slices, 2, 2, CASES)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{model}-{knobs['schedule']}" for model, knobs in CASES])
def test_it_equals_one_device(staged: list[tuple[list[Run], int]], case: int) -> None:
    assert largest_difference([runs[case] for runs, _ in staged], train(CASES[case][0], None, {})) < 1e-10


def test_the_last_stage_did_slice(staged: list[tuple[list[Run], int]]) -> None:
    (_, first), (_, last) = staged
    # Five rows and one of validation, in 3, 3 and 2 chunks.
    assert (first, last) == (0, 6 * (3 + 3 + 2))
