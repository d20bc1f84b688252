"""Sends and receives, as text in and text out."""

from hypothesis import given
from support.plans import drawn_plan, plans

from lightning_seq1f1b.schedule.plan import Plan, make_plan


def lowered(compute: tuple[str, ...], stage_to_rank: tuple[int, ...], microbatches: int, chunks: int) -> list[str]:
    plan = drawn_plan(stage_to_rank, microbatches, chunks, *compute)
    return [" ".join(map(str, row)) for row in plan.actions]


def test_one_stage_has_nothing_to_send() -> None:
    plan = make_plan("seq1f1b", 1, 2, 2)
    assert plan.actions == plan.compute


def test_sends_follow_their_producer_and_receives_lead_their_consumer_by_one() -> None:
    assert [" ".join(map(str, row)) for row in make_plan("seq1f1b", 2, 2, 1).actions] == [
        "0F0.0 0SEND_F0.0 0RECV_B0.0 0F1.0 0SEND_F1.0 0RECV_B1.0 0B0.0 0B1.0",
        "1RECV_F0.0 1F0.0 1RECV_F1.0 1B0.0 1SEND_B0.0 1F1.0 1B1.0 1SEND_B1.0",
    ]


def test_chunks_cross_one_by_one() -> None:
    assert [" ".join(map(str, row)) for row in make_plan("forward", 3, 1, 3).actions] == [
        "0F0.0 0SEND_F0.0 0F0.1 0SEND_F0.1 0F0.2 0SEND_F0.2",
        "1RECV_F0.0 1RECV_F0.1 1F0.0 1SEND_F0.0 1RECV_F0.2 1F0.1 1SEND_F0.1 1F0.2 1SEND_F0.2",
        "2RECV_F0.0 2RECV_F0.1 2F0.0 2RECV_F0.2 2F0.1 2F0.2",
    ]


def test_two_stages_on_one_rank_send_nothing_to_each_other() -> None:
    compute = "0F0.0 1F0.0 2F0.0 2B0.0 1B0.0 0B0.0"
    assert lowered((compute,), (0, 0, 0), 1, 1) == [compute]


def test_halves_of_a_backward_send_after_the_input_gradient() -> None:
    assert lowered(("0F0.0 0I0.0 0W0.0", "1F0.0 1I0.0 1W0.0"), (0, 1), 1, 1) == [
        "0RECV_B0.0 0F0.0 0SEND_F0.0 0I0.0 0W0.0",
        "1RECV_F0.0 1F0.0 1I0.0 1SEND_B0.0 1W0.0",
    ]


def test_a_loop_sends_both_ways_between_two_ranks() -> None:
    compute = ("0F0.0 2F0.0 2B0.0 0B0.0", "1F0.0 3F0.0 3B0.0 1B0.0")
    first, _ = lowered(compute, (0, 1, 0, 1), 1, 1)
    assert first == "2RECV_F0.0 0F0.0 0SEND_F0.0 2RECV_B0.0 2F0.0 2SEND_F0.0 0RECV_B0.0 2B0.0 2SEND_B0.0 0B0.0"


def test_receives_are_posted_in_the_order_of_the_sends() -> None:
    assert lowered(("0F0.0 0F1.0 0F2.0", "1F2.0 1F1.0 1F0.0"), (0, 1), 3, 1) == [
        "0F0.0 0SEND_F0.0 0F1.0 0SEND_F1.0 0F2.0 0SEND_F2.0",
        "1RECV_F0.0 1RECV_F1.0 1RECV_F2.0 1F2.0 1F1.0 1F0.0",
    ]


@given(plans(names=["seq1f1b", "gpipe"]))
def test_each_post_leads_its_consumer_by_one_compute_action(plan: Plan) -> None:
    for row, order in zip(plan.actions, plan.compute, strict=True):
        for index, action in enumerate(row):
            if action.kind.value.startswith("RECV"):
                consumer = order.index(action._replace(kind=action.kind.__class__(action.kind.value[-1])))
                assert sum(earlier.computes for earlier in row[:index]) == max(consumer - 1, 0)
            if action.kind.value.startswith("SEND"):
                assert row[index - 1] == action._replace(kind=action.kind.__class__(action.kind.value[-1]))


@given(plans())
def test_the_compute_order_is_kept(plan: Plan) -> None:
    for row, order in zip(plan.actions, plan.compute, strict=True):
        assert tuple(action for action in row if action.computes) == order
