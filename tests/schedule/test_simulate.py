"""Simulated steps against closed forms, published figures, and the longest path of a graph."""

from collections.abc import Callable
from fractions import Fraction
from graphlib import TopologicalSorter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.costs import ModelShape, head_flops, layer_flops
from lightning_seq1f1b.schedule.dependencies import dependencies
from lightning_seq1f1b.schedule.partition import balanced, equal_cost, even
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.simulate import Costs, simulate
from lightning_seq1f1b.schedule.spans import Span

times = st.fractions(0, 10, max_denominator=20)
stages, microbatches, chunks = st.integers(1, 6), st.integers(1, 5), st.integers(1, 6)


def test_every_small_plan_has_the_bubble_and_the_peak_of_the_formulas() -> None:
    for p in range(1, 7):
        for m in range(1, 6):
            for k in range(1, 7):
                simulation = simulate(make_plan("seq1f1b", p, m, k), Costs(Fraction(3), Fraction(5), Fraction(2), k))
                assert simulation.bubble == Fraction((p - 1) * 10, k)
                assert simulation.makespan == m * 10 + simulation.bubble
                assert simulation.work == (m * 10,) * p
                assert simulation.peak_units == tuple(min(p - r - 1 + k, m * k) for r in range(p))


@given(st.sampled_from(["seq1f1b", "gpipe"]), stages, microbatches, chunks, times, times, times)
def test_bubble_does_not_depend_on_how_the_time_is_divided(
    schedule: str, p: int, m: int, k: int, forward: Fraction, input_grad: Fraction, weight_grad: Fraction
) -> None:
    simulation = simulate(make_plan(schedule, p, m, k), Costs(forward, input_grad, weight_grad, k))
    assert simulation.bubble == (p - 1) * (forward + input_grad + weight_grad) / k


@given(stages, microbatches, times, times, times)
def test_whole_sequences(p: int, m: int, forward: Fraction, input_grad: Fraction, weight_grad: Fraction) -> None:
    simulation = simulate(make_plan("1f1b", p, m, 1), Costs(forward, input_grad, weight_grad, 1))
    assert simulation.bubble == (p - 1) * (forward + input_grad + weight_grad)
    assert simulation.peak_units == tuple(min(p - r, m) for r in range(p))


@given(stages, microbatches, chunks)
def test_gpipe_holds_every_unit(p: int, m: int, k: int) -> None:
    assert simulate(make_plan("gpipe", p, m, k), Costs(1, 1, 1, k)).peak_units == (m * k,) * p


@given(stages, microbatches, chunks)
def test_forward_only_holds_one_unit_and_idles_while_filling(p: int, m: int, k: int) -> None:
    simulation = simulate(make_plan("forward", p, m, k), Costs(Fraction(6), Fraction(1), Fraction(1), k))
    assert simulation.peak_units == (1,) * p
    assert simulation.bubble == Fraction((p - 1) * 6, k)


@pytest.mark.parametrize(("p", "m", "k", "bubble", "peak"), [(2, 2, 4, 6, 10), (3, 2, 3, 12, 10)])
def test_optimum_that_a_constraint_solver_proved(p: int, m: int, k: int, bubble: int, peak: int) -> None:
    """One stage on a rank, fused backward, forward = input gradient = weight gradient = 2 for each chunk."""
    simulation = simulate(make_plan("seq1f1b", p, m, k), Costs(2 * k, 2 * k, 2 * k, k))
    assert simulation.bubble == bubble
    assert 2 * max(simulation.peak_units) == peak


@given(
    st.sampled_from(["seq1f1b", "gpipe", "forward"]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_makespan_is_the_longest_path(schedule: str, p: int, m: int, k: int, random: Random) -> None:
    plan = make_plan(schedule, p, m, k)
    cost = {action: random.randint(0, 9) for row in plan.compute for action in row}
    simulation = simulate(plan, cost.__getitem__)
    ends = longest_path(plan, cost.__getitem__)
    assert {event.action: event.end for event in simulation.timeline} == ends
    work = [sum(map(cost.__getitem__, row)) for row in plan.compute]
    assert simulation.makespan == max(ends.values())
    assert simulation.bubble == max(ends.values()) - min(work)
    assert simulation.work == tuple(work)


def longest_path(plan: Plan, cost: Callable[[Action], int]) -> dict[Action, int]:
    needs = {action: set(dependencies(action, plan.codes)) for row in plan.compute for action in row}
    for row in plan.compute:
        for earlier, later in pairwise(row):
            needs[later].add(earlier)
    ends: dict[Action, int] = {}
    for action in TopologicalSorter(needs).static_order():
        ends[action] = max((ends[needed] for needed in needs[action]), default=0) + cost(action)
    return ends


@given(stages, microbatches, chunks, st.data())
def test_timeline_is_possible(p: int, m: int, k: int, data: st.DataObject) -> None:
    weights = tuple(data.draw(st.lists(st.integers(1, 9), min_size=k, max_size=k)))
    latency = data.draw(times)
    plan = make_plan("seq1f1b", p, m, k)
    costs = Costs(Fraction(3), Fraction(5), Fraction(2), k, weights)
    events = {event.action: event for event in simulate(plan, costs, latency).timeline}
    for rank, row in enumerate(plan.compute):
        for action in row:
            event = events[action]
            assert event.rank == rank
            assert event.end - event.start == costs(action)
            for needed in dependencies(action, plan.codes):
                crosses = needed.stage != action.stage
                assert events[needed].end + (latency if crosses else 0) <= event.start
        for earlier, later in pairwise(row):
            assert events[earlier].end <= events[later].start


def test_latency_is_paid_once_for_each_stage_that_is_passed() -> None:
    plan = make_plan("seq1f1b", 3, 1, 1)
    simulation = simulate(plan, Costs(Fraction(4), Fraction(3), Fraction(5), 1), latency=Fraction(1, 2))
    assert simulation.makespan == 3 * 12 + 4 * Fraction(1, 2)


def test_latency_hides_behind_the_compute_action_before() -> None:
    """With enough chunks under way, only filling and draining the pipeline pays for the link."""
    plan = make_plan("gpipe", 2, 4, 4)
    slow, fast = (simulate(plan, Costs(4, 4, 4, 4), latency) for latency in (Fraction(1, 2), 0))
    assert slow.makespan - fast.makespan == 1


@given(chunks, st.data())
def test_uneven_chunks_share_the_whole_time(k: int, data: st.DataObject) -> None:
    weights = tuple(data.draw(st.lists(st.fractions(1, 9), min_size=k, max_size=k)))
    costs = Costs(Fraction(3), Fraction(5), Fraction(2), k, weights)
    forwards = [Action.parse(f"0F0.{chunk}") for chunk in range(k)]
    assert sum(map(costs, forwards)) == 3
    assert sum(costs(action._replace(kind=Kind.B)) for action in forwards) == 7
    assert all(costs(action) * weights[0] == costs(forwards[0]) * weights[action.unit.chunk] for action in forwards)
    assert Costs(Fraction(3), Fraction(5), Fraction(2), k, (4,) * k)(forwards[-1]) == Fraction(3, k)


@pytest.mark.parametrize("field", ["forward", "input_grad", "weight_grad"])
@pytest.mark.parametrize("time", [-1, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(field: str, time: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is a time"):
        Costs(**{"forward": 1, "input_grad": 1, "weight_grad": 1, "num_chunks": 2, field: time})


@pytest.mark.parametrize("weights", [(1,), (1, 2, 3), (1, 0), ()])
def test_weights_that_do_not_fit_are_refused(weights: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="chunk_weights must be 2 positive numbers"):
        Costs(1, 1, 1, 2, weights)


LLAMA_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    gated_mlp=True,
    vocab_size=128256,
)


def llama_bubble(p: int, m: int, length: int, spans: tuple[Span, ...]) -> float:
    """Bubble in percent of the makespan when every stage has the same work; the last one fewer layers and the head."""
    head = head_flops(LLAMA_8B, 0, length)
    layers = LLAMA_8B.num_layers * layer_flops(LLAMA_8B, 0, length)
    last = ((layers + head) / p - head) / layers if p > 1 else 1.0
    shares = [(1 - last) / (p - 1)] * (p - 1) + [last]

    def flops(action: Action) -> float:
        span, is_last = spans[action.unit.chunk], action.stage == p - 1
        forward, both = (
            shares[action.stage] * LLAMA_8B.num_layers * layer_flops(LLAMA_8B, span.start, span.stop, training=training)
            + is_last * head_flops(LLAMA_8B, span.start, span.stop, training=training)
            for training in (False, True)
        )
        return forward if action.kind is Kind.F else both - forward

    simulation = simulate(make_plan("seq1f1b", p, m, len(spans)), flops)
    return 100 * float(simulation.bubble / simulation.makespan)


@pytest.mark.parametrize(
    ("p", "m", "kilotokens", "k", "even_bubble", "balanced_bubble", "whole_bubble"),
    [
        (4, 4, 128, 8, 31.6, 9.2, 42.9),
        (4, 4, 32, 8, 22.9, 9.1, 42.9),
        (4, 1, 128, 8, 38.0, 27.6, 75.0),
        (2, 2, 64, 4, 22.1, 11.2, 33.3),
    ],
)
def test_figures_of_another_simulator(
    p: int, m: int, kilotokens: int, k: int, even_bubble: float, balanced_bubble: float, whole_bubble: float
) -> None:
    """Bubbles of an 8B Llama that an independent discrete-event simulation gave, to its last digit."""
    length = 1024 * kilotokens
    by_layers = equal_cost(length, k, lambda start, stop: layer_flops(LLAMA_8B, start, stop))
    assert round(llama_bubble(p, m, length, even(length, k)), 1) == even_bubble
    assert round(llama_bubble(p, m, length, by_layers), 1) == balanced_bubble
    assert round(llama_bubble(p, m, length, even(length, 1)), 1) == whole_bubble
    assert llama_bubble(p, m, length, balanced(length, k, LLAMA_8B)) == pytest.approx(balanced_bubble, abs=0.25)
