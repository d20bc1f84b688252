"""Predictions against numbers made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planner_problems import random_problem

from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.estimate import Machine, Training, unit_sizes
from lightning_seq1f1b.schedule.memory_curve import memory_over_time
from lightning_seq1f1b.schedule.planner import Problem
from lightning_seq1f1b.schedule.planner.evaluation import Evaluation
from lightning_seq1f1b.schedule.planner.settings import Setting
from lightning_seq1f1b.schedule.simulate import simulate

SHAPE = ModelShape(4, 64, 4, 2, 16, 128, True, 1000)
PROBLEM = Problem(SHAPE, 2, 512, 3, Training(rows=2), Machine(1e9, 1e9, 2e9, None, 1e9, 0.0, 0.0))


def predicted(problem: Problem, setting: Setting):
    return Evaluation(problem).play(setting, whole=True)


def test_one_rank_takes_its_flops():
    """A layer has h (2 n d + 2 n_kv d) + 3 h f weights, a pair 4 n d FLOPs; backward 2 and 2.5 times as much."""
    problem = replace(PROBLEM, num_ranks=1)
    prediction = predicted(problem, Setting("1f1b", 1, 1, None, 1.0, (4,)))
    weights = 4 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128) + 64 * 1000
    linear = 3 * 2 * weights * 512
    attention = 3.5 * 4 * (2 * 2 * 64) * 512 * 512 / 2
    rows = 3 * 2
    assert prediction.seconds == pytest.approx(rows * (linear + attention) / 1e9)
    assert prediction.idle == pytest.approx(0.0)
    assert prediction.waiting == pytest.approx(0.0)
    assert prediction.utilisation(problem) == pytest.approx(0.5)  # the speed reached is half of the peak
    assert prediction.tokens_per_second(problem) == pytest.approx(rows * 512 / prediction.seconds)


def test_frozen_weights_do_not_count_as_work_that_was_done():
    problem = replace(PROBLEM, num_ranks=1, training=Training(rows=2, trainable_share=0.0))
    prediction = predicted(problem, Setting("1f1b", 1, 1, None, 1.0, (4,)))
    assert prediction.utilisation(problem) == pytest.approx(0.5)


def test_idle_time_is_told_apart_from_uneven_layers():
    prediction = predicted(PROBLEM, Setting("1f1b", 1, 1, None, 1.0, (3, 1)))
    first, last = prediction.work
    assert prediction.waiting == pytest.approx(1 - max(first, last) / prediction.seconds)
    assert prediction.idle == pytest.approx(1 - (first + last) / 2 / prediction.seconds)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "num_chunks", "knob"),
    [
        ("1f1b", 1, 1, None),
        ("gpipe", 1, 4, None),
        ("seq1f1b", 1, 4, None),
        ("seq1f1b_zb", 1, 4, 2),
        ("interleaved_seq1f1b", 2, 4, 1),
        ("interleaved_seq1f1b_zb", 2, 4, 3),
    ],
)
def test_memory_is_the_fullest_moment_of_the_simulated_step(seed, schedule, virtual_stages, num_chunks, knob):
    problem = replace(random_problem(seed), num_ranks=2)
    layers = (1,) * (2 * virtual_stages - 1) + (problem.shape.num_layers - 2 * virtual_stages + 1,)
    setting = Setting(schedule, virtual_stages, num_chunks, knob, 0.5, layers)
    evaluation = Evaluation(problem)
    memory = evaluation.play(setting, whole=True).memory
    sizes = unit_sizes(problem.shape, layers, setting.spans(problem), problem.training)
    plan = evaluation.plan(setting, problem.num_microbatches)
    timeline = simulate(plan, evaluation.times(setting), evaluation.latency(setting), early_weight_grads=True).timeline
    for rank, curve in zip(memory, memory_over_time(timeline, 2, sizes), strict=True):
        held = rank.activations + rank.keys_values + rank.logits
        assert held == pytest.approx(max(value for _, value in curve), rel=1e-9)
        assert min(rank) >= -1e-6 * rank.total
    assert memory[0].logits == 0 or len(layers) == 1
    assert max(rank.logits for rank in memory) == memory[1].logits


def test_logits_of_a_row_wait_on_the_last_rank():
    """One microbatch of whole rows, recomputed layers: the head's logits in float32 are all there is of its kind."""
    problem = replace(PROBLEM, num_microbatches=1)
    memory = predicted(problem, Setting("1f1b", 1, 1, None, 1.0, (2, 2))).memory
    assert memory[1].logits == pytest.approx(2 * 512 * 1000 * 4)
    assert memory[0].logits == 0
    assert memory[0].keys_values > 0


def test_a_plan_that_does_not_exist_is_no_prediction():
    assert predicted(PROBLEM, Setting("1f1b", 1, 4, None, 1.0, (2, 2))) is None
