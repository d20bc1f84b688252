"""The search against trying everything, and what must hold whatever it finds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planner_problems import random_problem

from lightning_seq1f1b.schedule.balance import nearby_layers
from lightning_seq1f1b.schedule.estimate import (
    Training,
    message_seconds,
    part_seconds,
    resident_bytes,
    transient_bytes,
    unit_sizes,
    unit_times,
)
from lightning_seq1f1b.schedule.memory_curve import memory_over_time
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.planner import Knobs, Problem, choose
from lightning_seq1f1b.schedule.planner.evaluation import Evaluation
from lightning_seq1f1b.schedule.planner.quantities import MESSAGES
from lightning_seq1f1b.schedule.planner.search import CLOSE, EQUAL, DoesNotFitError, search
from lightning_seq1f1b.schedule.planner.settings import MEMORY_KNOBS, Setting, settings
from lightning_seq1f1b.schedule.profile import PASSES, Fit, Profile
from lightning_seq1f1b.schedule.simulate import simulate

SEEDS = range(20)


def played(problem: Problem, setting: Setting) -> tuple[float, float] | None:
    """Seconds and fullest rank of a step, straight from plan and simulator; None when there is no plan."""
    spans = setting.spans(problem)
    times = unit_times(problem.shape, setting.layers, spans, problem.training, problem.machine)
    sizes = unit_sizes(problem.shape, setting.layers, spans, problem.training)
    messages = [message_seconds(problem.shape, span, problem.training, problem.machine) for span in spans]
    try:
        plan = make_plan(
            setting.schedule,
            problem.num_ranks,
            problem.num_microbatches,
            setting.num_chunks,
            virtual_stages=setting.virtual_stages,
            memory_knob=setting.memory_knob,
        )
    except ValueError:
        return None
    simulation = simulate(plan, times, sum(messages) / len(messages), early_weight_grads=True)
    longest = max(span.length for span in spans)
    message = MESSAGES * longest * problem.training.rows * problem.shape.hidden_size * problem.training.activation_bytes
    peaks = [
        max(held for _, held in curve) + resident.total + working + message
        for curve, resident, working in zip(
            memory_over_time(simulation.timeline, problem.num_ranks, sizes),
            resident_bytes(problem.shape, setting.layers, plan.stage_to_rank, problem.training),
            transient_bytes(problem.shape, setting.layers, spans, plan.stage_to_rank, problem.training),
            strict=True,
        )
    ]
    return float(simulation.makespan), max(peaks)


def everything(problem: Problem) -> dict[Setting, tuple[float, float]]:
    """Seconds and fullest rank of every setting, layers moved between its stages included."""
    parts = part_seconds(problem.shape, problem.length, problem.training, problem.machine)
    found = {}
    for setting in settings(problem):
        for layers in nearby_layers(setting.layers, problem.num_ranks, parts, (1, 2)):
            moved = replace(setting, layers=layers)
            if (both := played(problem, moved)) is not None:
                found[moved] = both
    return found


@pytest.fixture(scope="module")
def exhaustive() -> dict[int, dict[Setting, tuple[float, float]]]:
    return {seed: everything(random_problem(seed)) for seed in SEEDS}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_choice_is_within_three_percent_of_the_best_there_is(exhaustive, seed):
    problem = random_problem(seed)
    least = min(seconds for seconds, _ in exhaustive[seed].values())
    for prediction in (search(problem).best, choose(problem).prediction):
        seconds, peak = exhaustive[seed][prediction.setting]
        assert prediction.seconds == pytest.approx(seconds, rel=1e-9)
        assert prediction.peak == pytest.approx(peak, rel=1e-9)
        assert seconds <= 1.03 * least


@pytest.mark.parametrize("seed", SEEDS)
def test_the_choice_fits_into_the_memory_and_is_the_fastest_that_does(exhaustive, seed):
    found = {setting: exhaustive[seed].get(setting) for setting in settings(random_problem(seed))}
    found = {setting: both for setting, both in found.items() if both is not None}
    peaks = sorted(peak for _, peak in found.values())
    for memory in (peaks[0] * 1.001, peaks[len(peaks) // 4]):
        best = search(replace(random_problem(seed), memory=memory)).best
        least = min(seconds for seconds, peak in found.values() if peak <= memory)
        assert exhaustive[seed][best.setting][1] <= memory
        assert best.seconds <= 1.03 * least


@pytest.mark.parametrize("seed", SEEDS)
def test_what_does_not_fit_names_the_smallest_there_is(exhaustive, seed):
    problem = random_problem(seed)
    unmoved = set(settings(problem))
    least = min(peak for setting, (_, peak) in exhaustive[seed].items() if setting in unmoved)
    with pytest.raises(DoesNotFitError) as refusal:
        search(replace(problem, memory=0.9 * min(peak for _, peak in exhaustive[seed].values())))
    smallest = refusal.value.smallest
    assert exhaustive[seed][smallest.setting][1] <= (1 + CLOSE) * least
    # What is named does fit once there is so much memory.
    assert search(replace(problem, memory=1.0001 * smallest.peak)).best.peak <= 1.0001 * smallest.peak


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_hold_for_every_setting(exhaustive, seed):
    evaluation = Evaluation(random_problem(seed))
    for setting, (seconds, peak) in exhaustive[seed].items():
        assert evaluation.least_seconds(setting) <= seconds * (1 + 1e-9), setting
        assert evaluation.least_bytes(setting) <= peak * (1 + 1e-9), setting


@pytest.mark.parametrize("seed", range(4))
def test_less_memory_is_never_faster(seed):
    problem = random_problem(seed)
    free = search(problem).best
    before = free.seconds
    for share in (0.98, 0.95, 0.9, 0.8, 0.7):
        try:
            now = search(replace(problem, memory=share * free.peak)).best.seconds
        except DoesNotFitError:
            break
        # Either may be off by what the search does not look for, and by what a simpler setting may cost.
        assert now >= before * (1 - CLOSE - EQUAL)
        before = now
    assert before >= free.seconds * (1 - CLOSE - EQUAL)


def test_every_process_gets_the_same_answer():
    problem = random_problem(3)
    assert search(problem) == search(random_problem(3))
    assert choose(problem) == choose.__wrapped__(random_problem(3))


def test_a_long_step_is_continued_from_its_beginning():
    """From a few microbatches to hundreds, for every schedule: what is left out is more of the same."""
    problem = replace(random_problem(5), num_ranks=3, num_microbatches=240, length=4096, shortest_chunk=512)
    problem = replace(problem, shape=replace(problem.shape, num_layers=7))
    evaluation = Evaluation(problem)
    seen = set()
    for setting in settings(problem):
        key = (setting.schedule, setting.virtual_stages, setting.memory_knob)
        if key in seen or setting.num_chunks in (2, 3) or setting.partition == 1.0:
            continue
        short = evaluation.play(setting)
        if short is None or short.exact:
            continue
        seen.add(key)
        whole = evaluation.play(setting, whole=True)
        assert short.seconds == pytest.approx(whole.seconds, rel=2e-3), setting
        assert short.peak == pytest.approx(whole.peak, rel=0.02), setting
    assert {schedule for schedule, _, _ in seen} >= {"gpipe", "seq1f1b", "interleaved_seq1f1b", "seq1f1b_zb"}


def test_only_what_is_free_is_chosen():
    problem = replace(random_problem(1), num_ranks=2, length=4096)
    problem = replace(problem, shape=replace(problem.shape, num_layers=6))
    for knobs in (
        Knobs(schedule="seq1f1b"),
        Knobs(virtual_stages=2),
        Knobs(num_chunks=5),
        Knobs(partition=(2048, 1024, 1024)),
        Knobs(schedule="seq1f1b_zb", memory_knob=2),
        Knobs(layers=(1, 2, 2, 1)),
    ):
        setting = search(replace(problem, knobs=knobs)).best.setting
        for name, value in vars(knobs).items():
            assert value in (None, getattr(setting, name)), knobs
    assert search(replace(problem, knobs=Knobs(partition=(2048, 2048)))).best.setting.num_chunks == 2


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (Knobs(schedule="seq1f1"), "unknown schedule 'seq1f1', .* did you mean 'seq1f1b'"),
        (Knobs(schedule="forward"), "unknown schedule 'forward'"),
        (Knobs(virtual_stages=0), "virtual_stages must be at least 1, not 0"),
        (Knobs(virtual_stages=4), "makes 8 stages, but the model has 6 layers; set virtual_stages to 3 or less"),
        (Knobs(schedule="seq1f1b", virtual_stages=2), "no schedule fits schedule='seq1f1b', virtual_stages=2"),
        (Knobs(schedule="1f1b", num_chunks=2), "1f1b takes num_chunks=1"),
        (Knobs(memory_knob=0), "memory_knob must be at least 1, not 0"),
        (Knobs(schedule="gpipe", memory_knob=2), "memory_knob=2 has no effect on gpipe"),
        (Knobs(num_chunks=2, partition=(4096,)), "partition lists 1 chunks, but num_chunks is 2"),
        (Knobs(layers=(3, 2)), "layers lists 2 stages with 5 layers, but the model has 6"),
        (Knobs(num_chunks=5000), "cannot make 5000 chunks"),
    ],
)
def test_knobs_that_contradict_are_refused(knobs, words):
    problem = replace(random_problem(1), num_ranks=2, length=4096)
    problem = replace(problem, shape=replace(problem.shape, num_layers=6), knobs=knobs)
    with pytest.raises(ValueError, match=words):
        search(problem)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_ranks": 0}, "num_ranks must be at least 1, not 0"),
        ({"num_microbatches": 0}, "num_microbatches must be at least 1"),
        ({"length": 0}, "length must be at least 1"),
        ({"num_ranks": 50}, "layers cannot fill 50 ranks"),
    ],
)
def test_problems_without_an_answer_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(random_problem(0), **change)


def test_one_rank_needs_no_pipeline():
    setting = search(replace(random_problem(2), num_ranks=1)).best.setting
    assert (setting.virtual_stages, setting.num_chunks, setting.splits) == (1, 1, False)


def test_all_schedules_are_looked_at():
    problem = replace(random_problem(1), num_ranks=2, num_microbatches=4, length=4096)
    ranking = search(problem)
    assert {found.setting.schedule for found in ranking.predictions} == set(MEMORY_KNOBS)
    assert ranking.complete
    assert ranking.considered == len(list(settings(problem)))
    assert [found.seconds for found in ranking.predictions[1:]] == sorted(
        found.seconds for found in ranking.predictions[1:]
    )


def test_no_setting_in_the_ranking_is_faster_and_at_least_as_simple_as_the_first():
    for seed in SEEDS:
        ranking = search(random_problem(seed))
        best = ranking.best
        for found in ranking.predictions[1:]:
            assert found.seconds >= best.seconds or found.setting.complexity > best.setting.complexity


@pytest.mark.parametrize("seed", [4, 5])
def test_whatever_may_be_spent_the_first_is_the_fastest_of_the_ranking_and_shows_its_memory(seed):
    problem = replace(random_problem(seed), num_microbatches=400, length=4096, shortest_chunk=512)
    for budget in (1, 100_000):
        ranking = search(problem, budget)
        assert ranking.best.seconds <= (1 + max(EQUAL, CLOSE)) * min(found.seconds for found in ranking.predictions)
        assert [rank.total for rank in ranking.best.memory] == pytest.approx(ranking.best.peaks)


def test_even_chunks_win_where_boundaries_do_not_matter():
    """Without attention all boundaries that round to the same chunks are as fast."""
    problem = replace(random_problem(1), num_ranks=2, length=64, multiple=16, shortest_chunk=16)
    best = search(replace(problem, knobs=Knobs(schedule="seq1f1b", num_chunks=4))).best
    assert [span.length for span in best.setting.spans(problem)] == [16] * 4
    assert best.setting.partition == 0.0


def test_layers_are_shared_out_by_measured_times():
    """A head that takes as long as two layers, whatever its FLOPs are."""
    problem = replace(random_problem(1), num_ranks=2, length=4096)
    problem = replace(problem, shape=replace(problem.shape, num_layers=6))
    layer = dict.fromkeys(PASSES, Fit(0.0, 1e-6, 0.0))
    none, head = dict.fromkeys(PASSES, Fit(0.0, 0.0, 0.0)), dict.fromkeys(PASSES, Fit(0.0, 2e-6, 0.0))
    profile = Profile(problem.shape, 1, "bfloat16", "somewhere", layer, none, head)
    measured = replace(problem, profile=profile, training=Training(), knobs=Knobs(schedule="1f1b"))
    assert {setting.layers for setting in settings(measured)} == {(4, 2)}


def test_progress_is_told():
    told = []
    search(random_problem(1), progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == list(range(len(told)))
    assert {total for _, total in told} == {len(list(settings(random_problem(1))))}
