"""The order of the data is a function of seed and epoch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

from lightning_seq1f1b.cli.shuffling import EpochShuffle, LengthGroups


def order(seed: int, epoch: int, length: int = 50) -> list[int]:
    return list(EpochShuffle(length, seed, lambda: epoch))


def test_every_row_comes_once():
    assert sorted(order(3, 1)) == list(range(50))
    assert len(EpochShuffle(50, 3, lambda: 1)) == 50


def test_orders_differ_by_epoch_and_seed():
    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(one) for one in orders}) == len(orders)


def test_the_random_state_of_the_process_is_neither_used_nor_moved():
    torch.manual_seed(1)
    first = order(0, 0)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert order(0, 0) == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def grouped(epoch: int, count: int = 1010, batch_size: int = 4) -> tuple[list[list[int]], list[int]]:
    lengths = torch.randint(1, 500, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = list(LengthGroups(lengths, batch_size, 5, lambda: epoch))
    return [rows[start : start + batch_size] for start in range(0, count, batch_size)], lengths


def test_batches_of_similar_lengths_have_every_row_once_and_the_short_batch_last():
    batches, lengths = grouped(epoch=0)
    assert sorted(row for batch in batches for row in batch) == list(range(1010))
    assert [len(batch) for batch in batches] == [4] * 252 + [2]
    assert len(LengthGroups(lengths, 4, 5, lambda: 0)) == 1010
    padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in batches)
    assert padded < 1.05 * sum(lengths)


def test_batches_of_similar_lengths_depend_on_seed_and_epoch_alone():
    torch.manual_seed(1)
    first, _ = grouped(epoch=0)
    torch.manual_seed(2)
    assert grouped(epoch=0)[0] == first
    assert grouped(epoch=1)[0] != first


def test_batches_of_similar_lengths_come_in_no_order_of_length():
    batches, lengths = grouped(epoch=0)
    longest = [max(lengths[row] for row in batch) for batch in batches]
    falls = sum(later < earlier for earlier, later in pairwise(longest))
    assert 0.4 < falls / len(longest) < 0.6


@pytest.mark.parametrize("epoch", [0, 1])
def test_replicas_share_the_order_of_one_device(epoch):
    """Lightning deals the rows to the replicas in turn, so that a step over all of them has one device's rows."""
    shares = [
        list(DistributedSamplerWrapper(EpochShuffle(50, 3, lambda: epoch), num_replicas=2, rank=rank, shuffle=False))
        for rank in range(2)
    ]
    dealt = [row for rows in zip(*shares, strict=True) for row in rows]
    assert dealt == order(3, epoch)
