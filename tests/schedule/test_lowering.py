"""Sends and receives, as text in and text out."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule import policies
from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.lowering import lower


def rows(*texts: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, text.split())) for text in texts)


def lowered(compute: tuple[tuple[Action, ...], ...], stage_to_rank: tuple[int, ...], num_chunks: int) -> list[str]:
    return [" ".join(map(str, row)) for row in lower(compute, stage_to_rank, num_chunks)]


def test_one_stage_has_nothing_to_send() -> None:
    compute = policies.seq1f1b(1, 2, 2)
    assert lower(compute, (0,), 2) == compute


def test_sends_follow_their_producer_and_receives_lead_their_consumer_by_one() -> None:
    assert lowered(policies.seq1f1b(2, 2, 1), (0, 1), 1) == [
        "0F0.0 0SEND_F0.0 0RECV_B0.0 0F1.0 0SEND_F1.0 0RECV_B1.0 0B0.0 0B1.0",
        "1RECV_F0.0 1F0.0 1RECV_F1.0 1B0.0 1SEND_B0.0 1F1.0 1B1.0 1SEND_B1.0",
    ]


def test_chunks_cross_one_by_one() -> None:
    assert lowered(policies.forward_only(3, 1, 3), (0, 1, 2), 3) == [
        "0F0.0 0SEND_F0.0 0F0.1 0SEND_F0.1 0F0.2 0SEND_F0.2",
        "1RECV_F0.0 1RECV_F0.1 1F0.0 1SEND_F0.0 1RECV_F0.2 1F0.1 1SEND_F0.1 1F0.2 1SEND_F0.2",
        "2RECV_F0.0 2RECV_F0.1 2F0.0 2RECV_F0.2 2F0.1 2F0.2",
    ]


def test_two_stages_on_one_rank_send_nothing_to_each_other() -> None:
    compute = rows("0F0.0 1F0.0 2F0.0 2B0.0 1B0.0 0B0.0")
    assert lower(compute, (0, 0, 0), 1) == compute


def test_receives_are_posted_in_the_order_of_the_sends() -> None:
    compute = rows("0F0.0 0F1.0 0F2.0", "1F2.0 1F1.0 1F0.0")
    assert lowered(compute, (0, 1), 1) == [
        "0F0.0 0SEND_F0.0 0F1.0 0SEND_F1.0 0F2.0 0SEND_F2.0",
        "1RECV_F0.0 1RECV_F1.0 1RECV_F2.0 1F2.0 1F1.0 1F0.0",
    ]


@given(st.sampled_from([policies.seq1f1b, policies.gpipe]), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_each_post_leads_its_consumer_by_one_compute_action(
    policy: policies.Policy, num_stages: int, num_microbatches: int, num_chunks: int
) -> None:
    compute = policy(num_stages, num_microbatches, num_chunks)
    for row, order in zip(lower(compute, range(num_stages), num_chunks), compute, strict=True):
        assert tuple(action for action in row if action.computes) == order
        for index, action in enumerate(row):
            if action.kind.value.startswith("RECV"):
                consumer = order.index(action._replace(kind=action.kind.__class__(action.kind.value[-1])))
                assert sum(earlier.computes for earlier in row[:index]) == max(consumer - 1, 0)
            if action.kind.value.startswith("SEND"):
                assert row[index - 1] == action._replace(kind=action.kind.__class__(action.kind.value[-1]))
