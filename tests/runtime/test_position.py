"""A place in the plan, in words, for a reader on another thread."""

import time

import pytest

from lightning_seq1f1b.runtime.position import Position
from lightning_seq1f1b.schedule.actions import Action


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("1F0.3", "in the forward of microbatch 0, chunk 3"),
        ("1B0.3", "in the backward of microbatch 0, chunk 3"),
        ("2I1.0", "in the input gradient of microbatch 1, chunk 0"),
        ("2W1.0", "in the weight gradient of microbatch 1, chunk 0"),
        ("0SEND_F1.2", "sending the output of microbatch 1, chunk 2"),
        ("1RECV_F1.2", "waiting for the input of microbatch 1, chunk 2"),
        ("1RECV_B1.2", "waiting for the output gradient of microbatch 1, chunk 2"),
    ],
)
def test_an_action_in_words(action, words):
    position = Position()
    position.enter(Action.parse(action))
    assert str(position) == words
    assert position.stage == int(action[0])


def test_nothing_is_said_between_steps():
    position = Position()
    assert (str(position), position.stage) == ("", None)
    position.enter("waiting for the loss")
    assert (str(position), position.stage) == ("waiting for the loss", None)
    before = time.monotonic()
    position.leave()
    place, since = position.read()
    assert place is None
    assert since >= before
