"""What precedes a compute action, KV edges included."""

import pytest

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.codes import Codes
from lightning_seq1f1b.schedule.dependencies import dependencies

THREE_STAGES = Codes(num_stages=3, chunks=(4, 4))


@pytest.mark.parametrize(
    ("action", "needed"),
    [
        ("0F1.0", ""),
        ("0F1.2", "0F1.1"),
        ("2F1.0", "1F1.0"),
        ("2F1.2", "1F1.2 2F1.1"),
        ("2B1.3", "2F1.3"),
        ("2B1.1", "2B1.2 2F1.3"),
        ("0B1.3", "1B1.3 0F1.3"),
        ("0B1.0", "1B1.0 0B1.1 0F1.3"),
        ("2I1.1", "2I1.2 2F1.3"),
        ("0I1.0", "1I1.0 0I1.1 0F1.3"),
        ("1W1.2", "1I1.2"),
    ],
)
def test_three_stages_four_chunks(action: str, needed: str) -> None:
    found = dependencies(Action.parse(action), THREE_STAGES)
    assert set(found) == {Action.parse(text) for text in needed.split()}
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("action", "needed"),
    [
        ("0F0.0", ""),
        ("0F1.0", ""),
        ("0F2.0", ""),
        ("1F2.1", "0F2.1 1F2.0"),
        ("1B0.0", "1B0.1 1F0.1"),
        ("1B1.0", "1F1.0"),
        ("0I1.0", "1I1.0 0F1.0"),
        ("0B2.1", "1B2.1 0B2.2 0F2.2"),
        ("1W1.0", "1I1.0"),
    ],
)
def test_microbatches_of_different_chunks(action: str, needed: str) -> None:
    found = dependencies(Action.parse(action), Codes(num_stages=2, chunks=(2, 1, 3)))
    assert sorted(found) == sorted(Action.parse(text) for text in needed.split())


def test_one_chunk_on_one_stage_needs_nothing() -> None:
    assert dependencies(Action.parse("0F0.0"), Codes(num_stages=1, chunks=(1,))) == ()


@pytest.mark.parametrize("text", ["0SEND_F0.0", "1RECV_B0.0"])
def test_other_kinds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dependencies(Action.parse(text), THREE_STAGES)
