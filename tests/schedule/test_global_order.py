"""One order for all ranks: each in its own order, nothing before what it waits for."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.global_order import global_order
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.requirements import requirements


@given(st.sampled_from(["seq1f1b", "gpipe", "forward"]), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_order_is_one_in_which_all_ranks_could_run(
    schedule: str, num_stages: int, num_microbatches: int, num_chunks: int
) -> None:
    plan = make_plan(schedule, num_stages, num_microbatches, num_chunks)
    needed = requirements(plan.stage_to_rank, num_microbatches, num_chunks, trains=plan.trains)
    order = global_order(plan.actions, needed.waits_for)

    for rank, row in enumerate(plan.actions):
        assert tuple(action for where, action in order if where == rank) == row
    place = {action: index for index, (_, action) in enumerate(order)}
    assert len(place) == len(order)
    for action, earlier in needed.waits_for.items():
        assert all(place[each] < place[action] for each in earlier)
