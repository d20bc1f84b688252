"""Different batches end on every rank with the same words; equal ones pass."""

import pytest
import torch
import torch.distributed as dist
from support.processes import run_processes

from lightning_seq1f1b.runtime.agreement import BatchMismatchError, check_same_batch, check_same_plan, fingerprint


def check(rank, batches):
    dist.init_process_group("gloo", rank=rank, world_size=len(batches))
    try:
        check_same_batch(batches[rank], dist.group.WORLD)
    except BatchMismatchError as error:
        return str(error)
    return None


IDS = torch.arange(12).view(2, 6)


def test_equal_batches_pass():
    assert run_processes(check, 2, [{"input_ids": IDS, "num": torch.tensor(3.5)}] * 2) == [None, None]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"input_ids": IDS.flip(0)}, "'input_ids' is rank 0: [2, 6] int64 (checksum"),
        ({"input_ids": IDS[:1]}, "rank 1: [1, 6] int64"),
        ({"input_ids": IDS, "labels": IDS}, "'labels' is rank 0: missing; rank 1: [2, 6]"),
    ],
)
def test_unequal_batches_are_named_alike_on_all_ranks(other, words):
    first, second = run_processes(check, 2, [{"input_ids": IDS}, other])
    assert first == second
    assert words in first
    assert "broadcast_batch=True" in first


def plan(rank, identities):
    dist.init_process_group("gloo", rank=rank, world_size=len(identities))
    try:
        check_same_plan(identities[rank], dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return None


def test_unequal_plans_end_on_all_ranks_with_the_same_words():
    assert run_processes(plan, 2, [-(2**63), -(2**63)]) == [None, None]
    first, second = run_processes(plan, 2, [1, 2])
    assert first == second
    assert "made different plans for the same batch (hashes 00000001, 00000002)" in first


def test_the_checksum_sees_order_sign_and_fractions():
    def checksum(*values):
        return fingerprint({"x": torch.tensor(values)})["x"][2]

    distinct = [checksum(1, 2), checksum(2, 1), checksum(-1, 2), checksum(1.0, 2.0), checksum(1.0, 2.5), checksum(0, 0)]
    assert len(set(distinct)) == len(distinct)
