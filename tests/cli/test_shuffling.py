"""The order of the data is a function of seed and epoch."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

from lightning_seq1f1b.cli.shuffling import EpochShuffle


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


@pytest.mark.parametrize("epoch", [0, 1])
def test_replicas_share_the_order_of_one_device(epoch):
    """Lightning deals the rows to the replicas in turn, so that a step over all of them has one device's rows."""
    shares = [
        list(DistributedSamplerWrapper(EpochShuffle(50, 3, lambda: epoch), num_replicas=2, rank=rank, shuffle=False))
        for rank in range(2)
    ]
    dealt = [row for rows in zip(*shares, strict=True) for row in rows]
    assert dealt == order(3, epoch)
