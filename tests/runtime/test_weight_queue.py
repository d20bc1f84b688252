"""Weight gradients fill a device's idle time, not the time in which it still works off what was launched."""

import pytest
import torch

from lightning_seq1f1b.runtime import weight_queue
from lightning_seq1f1b.runtime.position import Position
from lightning_seq1f1b.runtime.split_backward import DeferredGradients
from lightning_seq1f1b.runtime.weight_queue import WeightQueue
from lightning_seq1f1b.schedule.actions import Action


class Work(DeferredGradients):
    """Notes that it was run."""

    def __init__(self, name, ran):
        super().__init__()
        self.name, self.ran = name, ran

    def accumulate(self):
        self.ran.append(self.name)


def queue_of(names, device="cpu"):
    queue, ran = WeightQueue(None, torch.device(device), Position()), []
    for name in names:
        queue.add(Action.parse(f"0W{name}"), Work(name, ran))
    return queue, ran


def test_runs_the_oldest_first_and_as_many_as_planned():
    queue, ran = queue_of(["0.1", "0.0", "1.1"])
    queue.run_oldest()
    queue.run_planned()
    assert ran == ["0.1"]
    queue.run_planned()
    queue.run_planned()
    assert ran == ["0.1", "0.0", "1.1"]
    assert queue.done == 3
    assert not queue


@pytest.mark.parametrize(("looks", "expected"), [(0, []), (1, ["0.1"]), (5, ["0.1", "0.0"])])
def test_fills_until_the_message_is_here_or_nothing_is_due(looks, expected):
    queue, ran = queue_of(["0.1", "0.0"])
    answers = iter([False] * looks + [True])
    queue.fill(lambda: next(answers))
    assert ran == expected


class FakeEvent:
    """Is over after some looks at it; a device's clock stands still otherwise."""

    def __init__(self, device):
        self.looks_left = 0

    def record(self):
        self.looks_left = 3

    def query(self):
        self.looks_left -= 1
        return self.looks_left < 0


@pytest.mark.parametrize(("arrives_after", "expected"), [(3, []), (4, ["0.1"]), (7, ["0.1"]), (8, ["0.1", "0.0"])])
def test_waits_while_the_device_is_busy(monkeypatch, arrives_after, expected):
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(weight_queue, "_POLL_S", 0)
    queue, ran = queue_of(["0.1", "0.0", "1.1"], device="cuda")
    queue.launched()
    answers = iter([False] * arrives_after + [True])
    queue.fill(lambda: next(answers))
    assert ran == expected
