"""Processes that an agent starts again share its store with those it had started before, and take nothing of theirs."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_seq1f1b.strategy.meeting import agree_on_start

WORLD_SIZE = 3
TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def connect():
    """Gives clients of one store."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)


def starts(connect, ranks=range(WORLD_SIZE)):
    """The name of one start, by rank."""
    stores = [connect() for _ in ranks]
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        return list(pool.map(lambda rank, store: agree_on_start(store, rank, WORLD_SIZE, TIMEOUT), ranks, stores))


def test_every_start_has_a_name_of_its_own_that_all_ranks_know(connect):
    names = [starts(connect) for _ in range(3)]
    assert all(len(set(each)) == 1 for each in names)
    assert len({each[0] for each in names}) == 3


def test_a_start_that_did_not_come_about_leaves_nothing_that_the_next_one_takes(connect):
    connect().set("asks/1", "of a rank that was ended while it waited")
    connect().set("asks/2", "of another one")
    assert len(set(starts(connect))) == 1


def test_rank_0_says_that_others_have_not_come(connect):
    with pytest.raises(TimeoutError, match="of 3 processes some have not come"):
        agree_on_start(connect(), 0, WORLD_SIZE, timedelta(seconds=0.2))
