"""Good plans pass; every way of breaking one is refused, and the error shows where."""

from collections import Counter, defaultdict
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from textwrap import dedent

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.plans import drawn_plan, plans, with_rows

from lightning_seq1f1b.schedule.actions import Action, Kind, Unit
from lightning_seq1f1b.schedule.lowering import lower
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.plan_error import PlanError
from lightning_seq1f1b.schedule.verify import verify

plans_with_messages = plans().filter(lambda plan: plan.num_ranks > 1)


def mutable(plan: Plan) -> list[list[Action]]:
    return [list(row) for row in plan.actions]


def test_every_small_plan_passes() -> None:
    for num_stages in range(1, 7):
        for num_microbatches in range(1, 6):
            for num_chunks in range(1, 7):
                verify(make_plan("seq1f1b", num_stages, num_microbatches, num_chunks))


@given(plans(most_ranks=6))
def test_plans_of_the_whole_family_pass(plan: Plan) -> None:
    verify(plan)


def test_stages_that_share_a_rank_pass() -> None:
    verify(drawn_plan((0, 1, 0, 1), 1, 1, "0F0.0 2F0.0 2B0.0 0B0.0", "1F0.0 3F0.0 3B0.0 1B0.0"))


@given(plans(), st.data())
def test_a_dropped_action_is_refused(plan: Plan, data: st.DataObject) -> None:
    rows = mutable(plan)
    rank = data.draw(st.integers(0, len(rows) - 1))
    dropped = rows[rank].pop(data.draw(st.integers(0, len(rows[rank]) - 1)))
    with pytest.raises(PlanError, match=f"rank {rank} lacks {dropped}"):
        verify(with_rows(plan, rows))


@given(plans(), st.data())
def test_a_doubled_action_is_refused(plan: Plan, data: st.DataObject) -> None:
    rows = mutable(plan)
    rank = data.draw(st.integers(0, len(rows) - 1))
    doubled = data.draw(st.sampled_from(rows[rank]))
    rows[rank].insert(data.draw(st.integers(0, len(rows[rank]))), doubled)
    with pytest.raises(PlanError, match=f"{doubled} stands twice on rank {rank}"):
        verify(with_rows(plan, rows))


@given(plans(), st.data())
def test_actions_swapped_across_a_dependency_are_refused(plan: Plan, data: st.DataObject) -> None:
    pairs = [
        (rank, row.index(earlier), row.index(later))
        for rank, row in enumerate(plan.actions)
        for earlier, later in precedences(plan)
        if earlier in row and later in row
    ]
    assume(pairs)
    rows = mutable(plan)
    rank, first, second = data.draw(st.sampled_from(pairs))
    rows[rank][first], rows[rank][second] = rows[rank][second], rows[rank][first]
    with pytest.raises(PlanError, match="which it waits for"):
        verify(with_rows(plan, rows))


@given(plans_with_messages, st.data())
def test_a_message_without_its_other_end_is_refused(plan: Plan, data: st.DataObject) -> None:
    rows = mutable(plan)
    rank, index = data.draw(
        st.sampled_from([(r, i) for r, row in enumerate(rows) for i, action in enumerate(row) if not action.computes])
    )
    dropped = rows[rank].pop(index)
    with pytest.raises(PlanError, match=rf"{partner(dropped)} has no partner: rank {rank} lacks {dropped}") as caught:
        verify(with_rows(plan, rows))
    assert f">{partner(dropped)}<" in str(caught.value)


@given(plans_with_messages, st.data())
def test_a_message_that_nobody_asked_for_is_refused(plan: Plan, data: st.DataObject) -> None:
    rows = mutable(plan)
    unit = Unit(0, 0)
    stray = data.draw(
        st.sampled_from(
            [
                Action(Kind.RECV_F, 0, unit),
                Action(Kind.SEND_B, 0, unit),
                Action(Kind.SEND_F, plan.num_stages - 1, unit),
                Action(Kind.RECV_B, plan.num_stages - 1, unit),
                Action(Kind.B if plan.splits_backward or not plan.trains else Kind.I, 0, unit),
            ]
        )
    )
    rank = plan.stage_to_rank[stray.stage]
    rows[rank].insert(data.draw(st.integers(0, len(rows[rank]))), stray)
    with pytest.raises(PlanError, match=f"{stray} has no place"):
        verify(with_rows(plan, rows))


@given(plans_with_messages, st.data())
def test_an_action_on_another_rank_is_refused(plan: Plan, data: st.DataObject) -> None:
    rows = mutable(plan)
    source, destination = data.draw(st.permutations(range(plan.num_ranks)).map(lambda order: order[:2]))
    moved = rows[source].pop(data.draw(st.integers(0, len(rows[source]) - 1)))
    rows[destination].append(moved)
    with pytest.raises(PlanError, match=f"{moved} belongs to rank {source}, but stands on rank {destination}"):
        verify(with_rows(plan, rows))


@given(plans_with_messages, st.data())
def test_receives_in_another_order_than_the_sends_are_refused(plan: Plan, data: st.DataObject) -> None:
    rows = mutable(plan)
    rank = data.draw(st.integers(1, plan.num_ranks - 1))
    posts = [index for index, action in enumerate(rows[rank]) if action.kind is Kind.RECV_F]
    assume(len(posts) > 1)
    first, second = sorted(data.draw(st.permutations(range(len(posts))))[:2])
    early, late = posts[first], posts[second]
    # Posting the later one at once is fine for its consumer; only the channel's order is broken.
    rows[rank].insert(early, rows[rank].pop(late))
    with pytest.raises(PlanError, match=rf"F from rank {rank - 1} to rank {rank}: .* is posted before"):
        verify(with_rows(plan, rows))


@given(plans(), st.data())
def test_verdict_on_any_two_swapped_actions_is_that_of_a_graph(plan: Plan, data: st.DataObject) -> None:
    rows = mutable(plan)
    rank = data.draw(st.integers(0, len(rows) - 1))
    first, second = (data.draw(st.integers(0, len(rows[rank]) - 1)) for _ in range(2))
    rows[rank][first], rows[rank][second] = rows[rank][second], rows[rank][first]
    assert accepts(replace(with_rows(plan, rows), activation_cap=None)) == can_run(plan, rows)


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_verdict_on_any_compute_order_is_that_of_a_graph(
    num_stages: int, num_microbatches: int, num_chunks: int, data: st.DataObject
) -> None:
    plan = make_plan("seq1f1b", num_stages, num_microbatches, num_chunks)
    compute = [list(row) for row in plan.compute]
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(compute))
        first, second = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
        row[first], row[second] = row[second], row[first]
    codes = plan.codes
    lowered = lower([codes.encode_row(row) for row in compute], plan.stage_to_rank, codes)
    rows = [list(codes.decode_row(row)) for row in lowered]
    assert accepts(with_rows(plan, rows)) == can_run(plan, rows)


def accepts(plan: Plan) -> bool:
    try:
        verify(plan)
    except PlanError:
        return False
    return True


def precedences(plan: Plan) -> list[tuple[Action, Action]]:
    """(earlier, later) for all actions of a step, restated here from the definitions."""
    found = []
    last_stage, last_chunk = plan.num_stages - 1, plan.num_chunks - 1
    half = Kind.I if plan.splits_backward else Kind.B

    def crosses(here: int, there: int) -> bool:
        return plan.stage_to_rank[here] != plan.stage_to_rank[there]

    for stage in range(plan.num_stages):
        for microbatch in range(plan.num_microbatches):
            for chunk in range(plan.num_chunks):
                unit, before = Unit(microbatch, chunk), Unit(microbatch, chunk - 1)
                forward, backward = Action(Kind.F, stage, unit), Action(half, stage, unit)
                if chunk > 0:
                    found.append((Action(Kind.F, stage, before), forward))
                if stage < last_stage:
                    found += passing(forward, Action(Kind.F, stage + 1, unit), crosses(stage, stage + 1))
                if not plan.trains:
                    continue
                found.append((Action(Kind.F, stage, Unit(microbatch, last_chunk)), backward))
                if plan.splits_backward:
                    found.append((backward, Action(Kind.W, stage, unit)))
                if chunk > 0:
                    found.append((backward, Action(half, stage, before)))
                if stage > 0:
                    found += passing(backward, Action(half, stage - 1, unit), crosses(stage, stage - 1))
    return found


def passing(producer: Action, consumer: Action, crosses: bool) -> list[tuple[Action, Action]]:
    """A result on its way from stage to stage."""
    if not crosses:
        return [(producer, consumer)]
    send = producer._replace(kind=Kind.SEND_F if producer.kind is Kind.F else Kind.SEND_B)
    return [(producer, send), (send, consumer), (partner(send), consumer)]


def can_run(plan: Plan, rows: list[list[Action]]) -> bool:
    """Whether the ranks' orders and the precedences make a graph without a cycle, and all channels keep their order."""
    graph: defaultdict[Action, set[Action]] = defaultdict(set)
    for row in rows:
        for earlier, later in pairwise(row):
            graph[later].add(earlier)
    for earlier, later in precedences(plan):
        graph[later].add(earlier)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return False
    for rank in range(len(rows)):
        for kind in (Kind.SEND_F, Kind.SEND_B):
            sends = [action for action in rows[rank] if action.kind is kind]
            receives = {partner(action) for action in sends}
            posted = [action for row in rows for action in row if action in receives]
            if posted != [partner(action) for action in sends]:
                return False
    return True


def partner(action: Action) -> Action:
    """The other end of a message when stage s lies on rank s."""
    kind, step = {
        Kind.SEND_F: (Kind.RECV_F, 1),
        Kind.RECV_F: (Kind.SEND_F, -1),
        Kind.SEND_B: (Kind.RECV_B, -1),
        Kind.RECV_B: (Kind.SEND_B, 1),
    }[action.kind]
    return Action(kind, action.stage + step, action.unit)


def test_precedences_name_every_action_of_a_plan() -> None:
    plan = make_plan("seq1f1b", 3, 2, 2)
    named = {action for pair in precedences(plan) for action in pair}
    assert Counter(named) == Counter(action for row in plan.actions for action in row)


def test_a_stall_says_what_each_rank_waits_for() -> None:
    plan = drawn_plan((0, 1), 2, 1, "0F0.0 0B0.0 0F1.0 0B1.0", "1F0.0 1F1.0 1B0.0 1B1.0")
    with pytest.raises(PlanError) as caught:
        verify(plan)
    expected = """
        the plan stalls: rank 0 waits at 0B0.0 for 1SEND_B0.0; rank 1 waits at 1F1.0 for 0SEND_F1.0

        rank 0 | 0RECV_B0.0 0F0.0      0SEND_F0.0 >0B0.0< 0RECV_B1.0 0F1.0      0SEND_F1.0 0B1.0
        rank 1 | 1RECV_F0.0 1RECV_F1.0 1F0.0      1F1.0   1B0.0      1SEND_B0.0 1B1.0      1SEND_B1.0
        """
    assert str(caught.value) == dedent(expected).strip()


def test_a_finished_rank_is_named_in_a_stall() -> None:
    plan = drawn_plan((0, 1, 2, 1), 1, 1, "0F0.0", "3F0.0 1F0.0", "2F0.0")
    with pytest.raises(PlanError) as caught:
        verify(replace(plan, trains=False))
    reason = "rank 1 waits at 3F0.0 for 2SEND_F0.0; rank 2 waits at 2F0.0 for 1SEND_F0.0; rank 0 is done"
    assert caught.value.reason == f"the plan stalls: {reason}"
    assert (caught.value.rank, caught.value.index) == (1, 2)


def test_a_large_plan_is_drawn_around_the_cell() -> None:
    plan = make_plan("seq1f1b", 12, 8, 4)
    rows = mutable(plan)
    index = next(index for index in range(40, 80) if rows[6][index].kind is Kind.SEND_F)
    producer, send = rows[6][index - 1 : index + 1]
    rows[6][index - 1 : index + 1] = [send, producer]
    with pytest.raises(PlanError) as caught:
        verify(with_rows(plan, rows))
    grid = str(caught.value).split("\n\n")[1].splitlines()
    assert [line.split(" | ")[0].strip() for line in grid] == [f"rank {rank}" for rank in range(2, 11)]
    assert f">{send}<" in grid[4]
    assert all(line.split(" | ")[1].startswith("... ") for line in grid)
    assert max(map(len, grid)) < 130


def test_a_dropped_forward_marks_the_action_that_waits_for_it() -> None:
    plan = make_plan("seq1f1b", 1, 1, 3)
    rows = mutable(plan)
    rows[0].remove(Action.parse("0F0.1"))
    with pytest.raises(PlanError) as caught:
        verify(with_rows(plan, rows))
    assert str(caught.value) == "rank 0 lacks 0F0.1\n\nrank 0 | 0F0.0 >0F0.2< 0B0.2 0B0.1 0B0.0"


def test_a_dropped_last_action_marks_the_end() -> None:
    plan = make_plan("seq1f1b", 1, 1, 1)
    with pytest.raises(PlanError) as caught:
        verify(with_rows(plan, [[plan.actions[0][0]]]))
    assert str(caught.value) == "rank 0 lacks 0B0.0\n\nrank 0 | 0F0.0 >end<"


@pytest.mark.parametrize("change", [{"stage_to_rank": (0, 2)}, {"rows": ((),)}, {"rows": ((), (), ())}])
def test_a_plan_without_a_row_for_every_rank_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a row of actions for every rank"):
        verify(replace(make_plan("seq1f1b", 2, 1, 1), **change))


@given(plans(names=["seq1f1b", "seq1f1b_zb", "interleaved_seq1f1b", "interleaved_seq1f1b_zb"]))
def test_holding_more_than_the_cap_is_refused(plan: Plan) -> None:
    last = Kind.W if plan.splits_backward else Kind.B
    most = 0
    for row in plan.compute:
        held = [sum((a.kind is Kind.F) - (a.kind is last) for a in row[: end + 1]) for end in range(len(row))]
        most = max(most, *held)
    verify(replace(plan, activation_cap=most))
    with pytest.raises(PlanError, match=rf"would hold {most} units at .*, more than activation_cap={most - 1}"):
        verify(replace(plan, activation_cap=most - 1))


def test_a_plan_of_forwards_alone_is_refused_where_it_should_train() -> None:
    with pytest.raises(PlanError, match=r"rank 0 lacks 0B0\.0"):
        verify(replace(make_plan("forward", 1, 1, 1), trains=True))
