"""Microbatches of one step with different numbers of chunks: valid, no slower and no larger than alike ones."""

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.costs import ModelShape, flops_of_layers
from lightning_seq1f1b.schedule.memory_curve import UnitSizes, peaks
from lightning_seq1f1b.schedule.partition import partition, training_flops
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.sharing_out import chunk_counts
from lightning_seq1f1b.schedule.simulate import simulate
from lightning_seq1f1b.schedule.unit_times import UnitTimes
from lightning_seq1f1b.schedule.verify import verify

ON_CHUNKS = sorted(name for name, policy in POLICIES.items() if not policy.whole_rows)
IN_TURNS = sorted(name for name in ON_CHUNKS if POLICIES[name].memory_knob)
SHAPES = {
    "8B": ModelShape(32, 4096, 32, 8, 128, 14336, True, 1),
    "0.6B": ModelShape(24, 1024, 16, 8, 128, 3072, True, 1),
    "mostly attention": ModelShape(24, 64, 4, 4, 16, 128, True, 1),
}
counts = st.lists(st.integers(1, 8), min_size=1, max_size=6).map(tuple)


def virtual_stages(schedule: str) -> int:
    return 2 if POLICIES[schedule].interleaves else 1


@st.composite
def times_of_each(draw: st.DrawFn, num_stages: int, chunks: tuple[int, ...]) -> tuple[UnitTimes, ...]:
    time = st.integers(0, 9)
    return tuple(
        UnitTimes(*(tuple(tuple(draw(time) for _ in range(count)) for _ in range(num_stages)) for _ in range(3)))
        for count in chunks
    )


@settings(max_examples=150)
@given(st.data(), st.sampled_from(ON_CHUNKS), counts, st.integers(1, 5), st.integers(1, 3))
def test_any_order_of_any_numbers_is_a_valid_plan(
    data: st.DataObject, schedule: str, chunks: tuple[int, ...], num_ranks: int, stages: int
) -> None:
    policy = POLICIES[schedule]
    stages = stages if policy.interleaves else 1
    times = data.draw(st.none() | times_of_each(num_ranks * stages, chunks))
    knob = data.draw(st.none() | st.integers(1, 3)) if policy.memory_knob else None
    plan = make_plan(schedule, num_ranks, len(chunks), chunks, virtual_stages=stages, memory_knob=knob, times=times)
    verify(plan)
    assert (plan.chunks, plan.num_chunks, plan.num_microbatches) == (chunks, max(chunks), len(chunks))
    kinds = 1 if not plan.trains else 3 if plan.splits_backward else 2
    assert sum(map(len, plan.compute)) == kinds * num_ranks * stages * sum(chunks)
    simulated = simulate(plan, data.draw(times_of_each(num_ranks * stages, chunks)), data.draw(st.integers(0, 5)))
    assert len(simulated.timeline) == sum(map(len, plan.compute))
    if plan.activation_cap is not None:
        assert max(simulated.peak_units) <= plan.activation_cap
    sizes = tuple(UnitSizes.one_each(plan.num_stages, count) for count in chunks)
    assert tuple(peaks(plan, sizes, simulated.rows)) == simulated.peak_units


@given(st.data(), st.sampled_from(IN_TURNS), counts, st.integers(2, 4))
def test_caps_are_kept(data: st.DataObject, schedule: str, chunks: tuple[int, ...], num_ranks: int) -> None:
    stages = virtual_stages(schedule)
    most = max(make_free(schedule, num_ranks, chunks))
    cap = data.draw(st.integers(max(1, most - num_ranks), most + 2))
    times = data.draw(st.none() | times_of_each(num_ranks * stages, chunks))
    try:
        plan = make_plan(
            schedule, num_ranks, len(chunks), chunks, virtual_stages=stages, activation_cap=cap, times=times
        )
    except ValueError as error:
        assume("activation_cap" not in str(error))  # too tight, and says so
        raise
    assert plan.activation_cap == cap
    assert max(simulate(plan, times or equal_times(plan.num_stages, chunks)).peak_units) <= cap


def make_free(schedule: str, num_ranks: int, chunks: tuple[int, ...]) -> tuple[int, ...]:
    """The peaks of the plan without a cap."""
    plan = make_plan(schedule, num_ranks, len(chunks), chunks, virtual_stages=virtual_stages(schedule))
    return simulate(plan, equal_times(plan.num_stages, chunks)).peak_units


def equal_times(num_stages: int, chunks: tuple[int, ...]) -> UnitTimes:
    return UnitTimes(*(((1,) * max(chunks),) * num_stages for _ in range(3)))


@given(st.sampled_from(sorted(POLICIES)), st.integers(1, 5), st.integers(1, 6), st.integers(1, 5))
def test_equal_numbers_give_the_plan_of_one_number(
    schedule: str, num_ranks: int, num_microbatches: int, num_chunks: int
) -> None:
    num_chunks = 1 if POLICIES[schedule].whole_rows else num_chunks
    stages = virtual_stages(schedule)
    plan = make_plan(schedule, num_ranks, num_microbatches, num_chunks, virtual_stages=stages)
    assert (
        make_plan(schedule, num_ranks, num_microbatches, [num_chunks] * num_microbatches, virtual_stages=stages) == plan
    )


@given(st.sampled_from(IN_TURNS), counts, st.integers(1, 5))
def test_no_rank_holds_more_than_with_as_many_of_the_longest(
    schedule: str, chunks: tuple[int, ...], num_ranks: int
) -> None:
    alike = (max(chunks),) * len(chunks)
    held = zip(make_free(schedule, num_ranks, chunks), make_free(schedule, num_ranks, alike), strict=True)
    assert all(ours <= theirs for ours, theirs in held)


@pytest.mark.parametrize("schedule", IN_TURNS)
@pytest.mark.parametrize("chunks", [(8, 3, 1, 1), (8, 8, 4), (5, 4, 4, 2), (6, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_equal_work_in_every_chunk_gives_the_bubble_of_alike_microbatches(
    schedule: str, chunks: tuple[int, ...], num_ranks: int
) -> None:
    stages = virtual_stages(schedule)
    unit = Fraction(1, stages)
    times = UnitTimes(*(((unit,) * 8,) * (num_ranks * stages) for _ in range(3)))
    bubble = simulate(make_plan(schedule, num_ranks, len(chunks), chunks, virtual_stages=stages), times).bubble
    # (p - 1) times F + B of a chunk, or max(F, F + B - W) where the backward is split; F = B = W.
    expected = (num_ranks - 1) * (1 if POLICIES[schedule].splits_backward else 3) * unit
    assert bubble == expected


@pytest.mark.parametrize("num_ranks", [3, 4, 5])
def test_a_last_group_of_fewer_units_than_ranks_waits_for_itself(num_ranks: int) -> None:
    times = UnitTimes(*(((1,) * 8,) * (2 * num_ranks) for _ in range(3)))
    plan = make_plan("interleaved_seq1f1b", num_ranks, 3, (8, 8, 3), virtual_stages=2)
    assert simulate(plan, times).bubble == 3 * (num_ranks - 1) + 2 * (num_ranks - 3)


def unit_times(shape: ModelShape, length: int, num_chunks: int, num_stages: int) -> UnitTimes:
    """FLOPs of the layers of a stage for every chunk of a row."""
    layers = range(shape.num_layers // num_stages)
    flops = [
        flops_of_layers(shape, layers, span.start, span.stop)
        for span in partition("balanced", length, num_chunks, shape)
    ]
    return UnitTimes(
        *(
            (tuple(getattr(each, kind) for each in flops),) * num_stages
            for kind in ("forward", "input_grad", "weight_grad")
        )
    )


def bubbles(schedule: str, shape: ModelShape, num_ranks: int, num_chunks: int, *, knows_times: bool) -> float:
    """The bubble of rows of 64, 1000, 333 and 5 tokens, as a share of that of equal work in as many alike chunks."""
    stages = virtual_stages(schedule)
    lengths = sorted((64, 1000, 333, 5), reverse=True)
    chunks = chunk_counts([training_flops(shape)(0, length) for length in lengths], num_chunks)
    times = tuple(
        unit_times(shape, length, count, num_ranks * stages) for length, count in zip(lengths, chunks, strict=True)
    )
    plan = make_plan(schedule, num_ranks, 4, chunks, virtual_stages=stages, times=times if knows_times else None)
    kinds = [sum(sum(getattr(each, kind)[0]) for each in times) for kind in ("forward", "input_grad", "weight_grad")]
    alike = UnitTimes(*(((kind / (4 * num_chunks),) * num_chunks,) * (num_ranks * stages) for kind in kinds))
    equal = make_plan(schedule, num_ranks, 4, num_chunks, virtual_stages=stages, times=alike)
    ours, theirs = simulate(plan, times), simulate(equal, alike)
    assert ours.work == pytest.approx(theirs.work)
    return float(ours.bubble / theirs.bubble)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_chunks", [4, 8])
def test_rows_of_very_different_lengths_wait_no_longer_than_equal_ones(
    shape: str, num_ranks: int, num_chunks: int
) -> None:
    assert bubbles("seq1f1b", SHAPES[shape], num_ranks, num_chunks, knows_times=False) <= 1.1


@pytest.mark.parametrize("schedule", sorted(set(IN_TURNS) - {"seq1f1b"}))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_chunks", [4, 8])
def test_neither_do_other_schedules_that_know_the_times(
    schedule: str, shape: str, num_ranks: int, num_chunks: int
) -> None:
    assert bubbles(schedule, SHAPES[shape], num_ranks, num_chunks, knows_times=True) <= 1.1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("seq1f1b", 2, 3, (2, 1)), r"num_chunks=\[2, 1\] is of 2 microbatches, but num_microbatches is 3"),
        (("seq1f1b", 2, 2, (2, 0)), "num_chunks must be at least 1, not 0"),
        (("seq1f1b", 2, 0, ()), "num_microbatches must be at least 1"),
        (("1f1b", 2, 2, (1, 2)), "schedule '1f1b' moves whole sequences, but num_chunks is 2"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments: tuple[str, int, int, tuple[int, ...]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_plan(*arguments)


def test_times_of_other_steps_are_refused() -> None:
    plan = make_plan("seq1f1b", 2, 2, (3, 1))
    long, short = equal_times(2, (3,)), equal_times(2, (1,))
    assert simulate(plan, (long, short)).makespan == simulate(plan, long).makespan
    with pytest.raises(ValueError, match="times of 1 microbatches were given for 2 microbatches of 3, 1 chunks"):
        simulate(plan, (long,))
    with pytest.raises(
        ValueError, match=r"forward must have the times of 2 microbatches .* on 2 stages, and has fewer"
    ):
        simulate(plan, (short, long))
