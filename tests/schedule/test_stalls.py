"""One order for all ranks: each in its own order, nothing before what it waits for."""

from hypothesis import given
from support.plans import plans, sends

from lightning_seq1f1b.schedule.dependencies import dependencies
from lightning_seq1f1b.schedule.plan import Plan
from lightning_seq1f1b.schedule.stalls import global_order


@given(plans())
def test_order_is_one_in_which_all_ranks_could_run(plan: Plan) -> None:
    order = plan.codes.decode_row(global_order(plan.rows, plan.codes, sends(plan)))

    for rank, row in enumerate(plan.actions):
        assert tuple(action for action in order if plan.stage_to_rank[action.stage] == rank) == row
    place = {action: index for index, action in enumerate(order)}
    assert len(place) == len(order)
    for action in order:
        if action.computes:
            assert all(place[each] < place[action] for each in dependencies(action, plan.codes))
