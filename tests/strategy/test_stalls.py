"""Where a thread is and for how long; and what is said of a stall."""

import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_seq1f1b.runtime.position import Position
from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.strategy import stalls
from lightning_seq1f1b.strategy.stalls import MainThread, Standing, report
from lightning_seq1f1b.strategy.whereabouts import of_failure


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(stalls, "time", clock)
    return clock


class Still(Position):
    """A position of the test's making."""

    at = (None, 0.0)

    def read(self):
        return self.at


def watch(clock, main, seconds):
    """Look twice a second for so long; returns the last look."""
    for _ in range(int(seconds * 2)):
        clock.now += 0.5
        standing = main.look()
    return standing


def test_time_at_an_action_counts_from_its_beginning(clock):
    position = Still()
    main = MainThread(position, threading.get_ident())
    position.at = (Action.parse("1RECV_F0.2"), clock.now)
    standing = watch(clock, main, 7.0)
    assert standing == Standing("waiting for the input of microbatch 0, chunk 2", 7.0, 1, waits=True, is_awaited=False)
    position.at = (Action.parse("1F0.2"), clock.now)
    standing = watch(clock, main, 2.0)
    assert (standing.seconds, standing.waits, standing.is_awaited) == (2.0, True, True)


def test_time_in_which_the_process_was_stopped_does_not_count(clock):
    position = Still()
    main = MainThread(position, threading.get_ident())
    position.at = (Action.parse("1F0.2"), clock.now)
    watch(clock, main, 3.0)
    clock.now += 3600.0
    assert main.look().seconds == 3.0
    assert watch(clock, main, 2.0).seconds == 5.0


def test_a_thread_outside_a_step_that_does_nothing_for_others_does_not_wait(clock):
    main = MainThread(Still(), threading.get_ident())
    standing = watch(clock, main, 9.0)
    assert (standing.words, standing.waits, standing.seconds) == ("between steps", False, 8.5)


class Waiting(Dataset):
    """Rows that come when they may."""

    def __init__(self):
        self.asked, self.may = threading.Event(), threading.Event()

    def __len__(self):
        return 1

    def __getitem__(self, index):
        self.asked.set()
        self.may.wait(20)
        return torch.zeros(1)


def test_a_thread_in_a_data_loader_is_seen_there():
    rows = Waiting()
    thread = threading.Thread(target=lambda: list(DataLoader(rows)))
    thread.start()
    assert rows.asked.wait(20)
    standing = MainThread(Position(), thread.ident).look()
    rows.may.set()
    thread.join()
    assert (standing.words, standing.waits, standing.is_awaited) == ("in the data loader", True, True)


def test_a_failure_in_a_data_loader_is_seen_there():
    class Failing(Waiting):
        def __getitem__(self, index):
            raise KeyError(index)

    with pytest.raises(KeyError) as caught:
        list(DataLoader(Failing()))
    assert of_failure(caught.value) == "in the data loader"


def who(rank, stage=None):
    return f"rank {rank} (stage {rank if stage is None else stage})"


def waiting(seconds):
    return Standing("waiting for the input of microbatch 0, chunk 2", seconds, 0, waits=True, is_awaited=False)


def test_a_report_names_the_silent_rank_last():
    text = report({0: waiting(30.0)}, {1: " 29.5 s before, between steps"}, 30.0, who, 2)
    assert "   0      0     30.0  waiting for the input of microbatch 0, chunk 2\n" in text
    assert "   1      1           does not answer" in text
    assert text.splitlines()[-1].startswith("rank 1 (stage 1) does not answer: it is stopped")


def test_a_report_names_the_rank_that_others_wait_for_last():
    loading = Standing("in the data loader", 31.0, None, waits=True, is_awaited=True)
    text = report({0: waiting(30.0), 1: loading}, {}, 30.0, who, 2)
    assert text.endswith("rank 1 (stage 1) waits for no other rank: for 31.0 s it has been in the data loader")
    assert "every rank waits" in report({0: waiting(30.0), 1: waiting(29.0)}, {}, 30.0, who, 2)


def test_looking_is_cheap():
    main = MainThread(Position(), threading.get_ident())
    begin = time.perf_counter()
    for _ in range(200):
        main.look()
    assert (time.perf_counter() - begin) / 200 < 2.5e-3  # half a per cent of the half second between two looks
