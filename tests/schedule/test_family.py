"""The schedule family against closed forms, the optima of a constraint solver, and bounds that nothing can beat."""

import re
from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.plans import plans

from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.dependencies import dependencies
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.simulate import Costs, Simulation, simulate
from lightning_seq1f1b.schedule.unit_times import UnitTimes

RATIOS = [(1, 1, 1), (3, 5, 2), (4, 7, 1), (1, 1, 0), (1, 2, 1)]
"""Forward : input gradient : weight gradient. Equal; an 8B model at 32K and at 128K tokens; LoRA; recomputation."""


def uniform(ratio: tuple[int, int, int], num_stages: int, num_chunks: int) -> UnitTimes:
    """Times of one unit each."""
    return UnitTimes(*(((Fraction(time),) * num_chunks,) * num_stages for time in ratio))


def simulated(schedule: str, p: int, m: int, k: int, v: int, ratio: tuple[int, int, int], **knobs: int) -> Simulation:
    times = uniform(ratio, p * v, k)
    return simulate(make_plan(schedule, p, m, k, virtual_stages=v, times=times, **knobs), times)


# ---- optima that a constraint solver proved ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "m", "k", "memory", "fused", "split", "loop"),
    [
        (2, 2, 4, 8, 12, 8, 4),
        (2, 2, 4, 9, None, None, 1),
        (2, 2, 4, 10, 6, 2, 1),
        (3, 2, 3, 6, 24, 16, 8),
        (3, 2, 3, 8, 18, 10, 2),
        (3, 2, 3, 10, 12, 4, 2),
        (2, 1, 4, 8, 6, 4, 2),
        (2, 1, 4, 9, None, None, 2),
        (2, 1, 4, 10, 6, 4, 2),
    ],
)
def test_optima_at_a_given_memory(
    p: int, m: int, k: int, memory: int, fused: int | None, split: int | None, loop: int
) -> None:
    """F = B = W = 2 for a chunk on a rank; memory in half-chunks of a rank."""
    for schedule, v, optimum in (
        ("seq1f1b", 1, fused),
        ("seq1f1b_zb", 1, split),
        ("interleaved_seq1f1b_zb", 2, loop),
    ):
        if optimum is None:
            continue
        simulation = simulated(schedule, p, m, k, v, (2 // v,) * 3, activation_cap=memory * v // 2)
        assert simulation.bubble == optimum
        assert max(simulation.peak_units) * 2 <= memory * v


@pytest.mark.parametrize(
    ("ratio", "split", "fused_loop", "split_loop"),
    [((3, 5, 2), 0.60, 0.50, 0.30), ((4, 7, 1), 0.83, 0.50, 0.42), ((1, 1, 0), 1.00, 0.50, 0.50)],
)
def test_unequal_times_as_a_share_of_the_bubble_of_seq1f1b(
    ratio: tuple[int, int, int], split: float, fused_loop: float, split_loop: float
) -> None:
    whole = simulated("seq1f1b", 3, 2, 3, 1, ratio).bubble
    assert round(float(simulated("seq1f1b_zb", 3, 2, 3, 1, ratio).bubble / whole), 2) == split
    for schedule, share in (("interleaved_seq1f1b", fused_loop), ("interleaved_seq1f1b_zb", split_loop)):
        simulation = simulated(schedule, 3, 2, 3, 2, ratio)
        assert round(float(simulation.bubble / (2 * whole)), 2) == share
        assert max(simulation.peak_units) == 8  # 6 units are the floor, seq1f1b's 5 chunks would be 10


# ---- formulas ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.sampled_from(RATIOS))
def test_interleaving_divides_the_bubble(p: int, m: int, k: int, v: int, ratio: tuple[int, int, int]) -> None:
    assume(m * k >= p)
    simulation = simulated("interleaved_seq1f1b", p, m, k, v, ratio)
    assert simulation.bubble == (p - 1) * sum(ratio)  # of units, which are 1 / (v k) of a microbatch on a rank
    if k >= p or v == 1:
        assert simulation.peak_units == tuple(min(v * k + p - 1 - r, v * m * k) for r in range(p))


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.sampled_from(RATIOS))
def test_interleaved_whole_sequences(p: int, groups: int, v: int, ratio: tuple[int, int, int]) -> None:
    simulation = simulated("interleaved_1f1b", p, groups * p, 1, v, ratio)
    assert simulation.bubble == (p - 1) * sum(ratio)
    assert simulation.peak_units[0] == min(v * p + p - 1, v * groups * p)


@given(st.integers(1, 6), st.integers(1, 8), st.sampled_from(RATIOS))
def test_split_whole_sequences(p: int, m: int, ratio: tuple[int, int, int]) -> None:
    forward, input_grad, weight_grad = ratio
    assume(m >= 2 * p)
    simulation = simulated("zb1p", p, m, 1, 1, ratio)
    assert simulation.bubble == (p - 1) * max(forward, forward + input_grad - weight_grad)
    assert max(simulation.peak_units) == p


def flagship_bound(p: int, m: int, k: int, v: int, j: int, ratio: tuple[int, int, int]) -> int:
    """Bubble of the interleaved, split schedule with memory knob j, in units.

    Weight gradients fill the gaps, but only those of microbatches before the last, of which there may be too few.
    """
    forward, input_grad, weight_grad = ratio
    filled = min(j * (p - 1), (m - 1) * k * v) * weight_grad
    return max((p - 1) * forward, (p - 1) * (forward + input_grad) - filled)


def is_exception(p: int, k: int, v: int, j: int, ratio: tuple[int, int, int]) -> bool:
    """Where the order misses its formula by more: recomputation's times, as many chunks as ranks, and j = 2."""
    return ratio == (1, 2, 1) and j == 2 and v > 1 and k == p and p in (4, 5, 7, 8)


@pytest.mark.parametrize("ratio", RATIOS)
def test_flagship_is_near_its_formula_and_above_the_lower_bound(ratio: tuple[int, int, int]) -> None:
    random = Random(str(ratio))
    space = [
        (p, m, k, v, j)
        for p in range(2, 9)
        for k in range(p, 17)
        for m in range(2, 9)
        for v in (1, 2, 4)
        for j in (1, 2)
        if not is_exception(p, k, v, j, ratio)
    ]
    smallest = [each for each in space if each[2] == each[0]]  # as many chunks as ranks, where it is tightest
    for p, m, k, v, j in random.sample(space, 14) + random.sample(smallest, 10):
        simulation = simulated("interleaved_seq1f1b_zb", p, m, k, v, ratio, memory_knob=j)
        formula, slack = flagship_bound(p, m, k, v, j, ratio), Fraction((p - 1) * sum(ratio), 20)
        assert (p - 1) * ratio[0] <= simulation.bubble <= formula + slack, (p, m, k, v, j)
        assert max(simulation.peak_units) <= v * k + j * (p - 1)


@given(st.integers(2, 5), st.integers(2, 8), st.integers(1, 3), st.sampled_from(RATIOS))
def test_flagship_with_one_microbatch(p: int, k: int, v: int, ratio: tuple[int, int, int]) -> None:
    assume(k >= p)
    assert simulated("interleaved_seq1f1b_zb", p, 1, k, v, ratio).bubble == (p - 1) * (ratio[0] + ratio[1])


# ---- any times -----------------------------------------------------------------------------------------------------

some_time = st.integers(0, 9)


@given(plans(names=["seq1f1b_zb", "interleaved_seq1f1b_zb", "zb1p", "interleaved_seq1f1b"]), st.randoms(), some_time)
def test_no_plan_stalls_or_passes_its_cap_whatever_the_times(plan: Plan, random: Random, latency: int) -> None:
    time = {action: random.randint(0, 9) for row in plan.compute for action in row}
    simulation = simulate(plan, time.__getitem__, latency)
    assert len(simulation.timeline) == sum(map(len, plan.compute))
    if plan.activation_cap is not None:
        assert max(simulation.peak_units) <= plan.activation_cap
    for rank, row in enumerate(plan.compute):
        ran = [event for event in simulation.timeline if event.rank == rank]
        assert tuple(event.action for event in ran) == row
        assert all(first.end <= second.start for first, second in pairwise(ran))
        halves = [[(a.stage, a.unit) for a in row if a.kind is kind] for kind in (Kind.I, Kind.W)]
        assert halves[0] == halves[1] or not plan.splits_backward


@given(plans(names=["seq1f1b_zb", "interleaved_seq1f1b_zb", "zb1p"]), st.randoms(), some_time)
def test_weight_gradients_run_early_only_while_the_rank_would_wait(plan: Plan, random: Random, latency: int) -> None:
    """As in the executor: all else keeps its order, and by the n-th place of a W at least n of them have run."""
    time = {action: random.randint(1, 9) for row in plan.compute for action in row}
    simulation = simulate(plan, time.__getitem__, latency, early_weight_grads=True)
    assert max(simulation.peak_units) <= plan.activation_cap
    end = {event.action: event.end for event in simulation.timeline}
    for rank, row in enumerate(plan.compute):
        events = [event for event in simulation.timeline if event.rank == rank]
        ran = [event.action for event in events]
        weight_grads, others = ([a for a in row if (a.kind is Kind.W) == is_w] for is_w in (True, False))
        assert [a for a in ran if a.kind is not Kind.W] == others
        assert [a for a in ran if a.kind is Kind.W] == weight_grads
        for place, event in enumerate(events):
            if event.action.kind is not Kind.W:
                continue
            following = next((a for a in ran[place:] if a.kind is not Kind.W), None)
            due = row[: row.index(following)] if following else row
            if event.action not in due:
                needed = dependencies(following, plan.codes)
                arrivals = [end[n] + (latency if plan.stage_to_rank[n.stage] != rank else 0) for n in needed]
                assert max(arrivals) > event.start
        for place, action in enumerate(ran):
            if action.kind is not Kind.W:
                planned = sum(a.kind is Kind.W for a in row[: row.index(action)])
                assert sum(a.kind is Kind.W for a in ran[:place]) >= planned


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.booleans(), st.data())
def test_caps_are_kept_and_larger_ones_are_never_slower(
    p: int, m: int, k: int, v: int, split: bool, data: st.DataObject
) -> None:
    """Down to the floor, below which nothing could run."""
    name = "interleaved_seq1f1b_zb" if split else "interleaved_seq1f1b"
    ratio = data.draw(st.sampled_from(RATIOS))
    full = simulated(name, p, m, k, v, ratio)
    outcomes = [outcome(name, p, m, k, v, ratio, cap) for cap in range(1, max(full.peak_units) + 1)]
    kept = [each for each in outcomes if isinstance(each, Simulation)]
    for cap, each in enumerate(outcomes, start=1):
        if isinstance(each, Simulation):
            assert max(each.peak_units) <= cap
        else:
            # What is refused is below all that is not, but for caps that make it serial, and names the next that works.
            named = int(re.findall(r"activation_cap=(\d+)", each)[-1])
            assert not any(isinstance(other, Simulation) for other in outcomes[cap - 1 : named - 1])
            assert isinstance(outcomes[named - 1], Simulation)
    assert min(each.bubble for each in kept) == kept[-1].bubble <= full.bubble


def outcome(schedule: str, p: int, m: int, k: int, v: int, ratio: tuple[int, int, int], cap: int) -> Simulation | str:
    """The step under a cap, or why it is refused."""
    try:
        return simulated(schedule, p, m, k, v, ratio, activation_cap=cap)
    except ValueError as refusal:
        return str(refusal)


def test_costs_of_whole_microbatches_are_shared_by_chunks_and_virtual_stages() -> None:
    plan = make_plan("interleaved_seq1f1b_zb", 2, 3, 4, virtual_stages=2)
    costs = Costs(Fraction(8), Fraction(16), Fraction(4), 4, virtual_stages=2)
    assert simulate(plan, costs).work == (3 * 28, 3 * 28)
    assert [costs(Action.parse(text)) for text in ("0F0.0", "1I0.1", "3W1.1", "2B0.3")] == [1, 2, Fraction(1, 2), 2.5]
