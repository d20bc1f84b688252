"""Plans of the whole family for property tests, and what is needed to break them."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from hypothesis import strategies as st

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.codes import Codes
from lightning_seq1f1b.schedule.lowering import lower
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.transfers import transfers


@st.composite
def plans(draw: st.DrawFn, most_ranks: int = 4, names: Iterable[str] = tuple(POLICIES)) -> Plan:
    """Small plans of any schedule, with any of their knobs that work; microbatches may have different chunks."""
    name = draw(st.sampled_from(sorted(names)))
    policy = POLICIES[name]
    num_ranks, microbatches = draw(st.integers(1, most_ranks)), draw(st.integers(1, 4))
    each = st.lists(st.integers(1, 5), min_size=microbatches, max_size=microbatches)
    chunks = 1 if policy.whole_rows else draw(st.integers(1, 5) | each)
    virtual_stages = draw(st.integers(1, 3)) if policy.interleaves else 1
    knob = draw(st.integers(1, 2)) if policy.memory_knob else None
    return make_plan(name, num_ranks, microbatches, chunks, virtual_stages=virtual_stages, memory_knob=knob)


def sends(plan: Plan) -> dict[int, int]:
    """The send of every compute action whose result crosses to another rank, as codes."""
    rows = chain.from_iterable(plan.compute_rows)
    messages = transfers(rows, plan.stage_to_rank, plan.codes.num_indices, plan.codes.units_on_a_stage)
    return {message.producer: message.send for message in messages}


def with_rows(plan: Plan, rows: Iterable[Iterable[Action]]) -> Plan:
    """The plan with other actions."""
    return replace(plan, rows=tuple(map(plan.codes.encode_row, rows)))


def drawn_plan(stage_to_rank: tuple[int, ...], num_microbatches: int, num_chunks: int, *rows: str) -> Plan:
    """A plan whose compute actions are given as text, a row for each rank, lowered but not verified."""
    codes = Codes(len(stage_to_rank), (num_chunks,) * num_microbatches)
    compute = [codes.encode_row(map(Action.parse, row.split())) for row in rows]
    return Plan(
        schedule="drawn by hand",
        chunks=codes.chunks,
        stage_to_rank=stage_to_rank,
        rows=lower(compute, stage_to_rank, codes),
        splits_backward=any("I" in row for row in rows),
    )
