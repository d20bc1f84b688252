"""The first action that makes something NaN is named: not those that only pass it on."""

import threading

import pytest
import torch
from support.toy_stage import VOCAB, toy_stages

from lightning_seq1f1b.runtime.batching import cut_batch
from lightning_seq1f1b.runtime.executor import Executor
from lightning_seq1f1b.runtime.finite import FiniteCheck, first_of
from lightning_seq1f1b.runtime.transport import InProcessTransport, Mailbox
from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.partition import even
from lightning_seq1f1b.schedule.plan import make_plan

ROWS, LENGTH, CHUNKS, RANKS = 2, 13, 3, 2
SCHEDULES = [("seq1f1b", 1), ("gpipe", 1), ("seq1f1b_zb", 1), ("interleaved_seq1f1b", 2)]
NAN, INFINITE = float("nan"), float("inf")


def found(stages, schedule, virtual, *, gradients=True):
    """What all ranks find in one step, each a thread, and the plan."""
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    microbatches = cut_batch({"input_ids": ids, "labels": ids}, ROWS, even(LENGTH, CHUNKS))
    plan = make_plan(schedule, RANKS, ROWS, CHUNKS, virtual_stages=virtual)
    mailbox, findings, errors = Mailbox(), [[] for _ in range(RANKS)], []

    def rank(index):
        own = {stage.index: stage for stage in stages if plan.stage_to_rank[stage.index] == index}
        check = FiniteCheck(torch.nn.ModuleDict({str(key): stage for key, stage in own.items()}), gradients=gradients)
        executor = Executor(own, InProcessTransport(mailbox, index, 20.0), index, torch.device("cpu"))
        try:
            executor.run(plan, microbatches, finite=check)
            findings[index] = check.findings()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return findings, plan


def spoiled_forward(stage, unit, value):
    """Make one element of what a stage gives for one unit NaN or infinite."""
    forward = stage.forward

    def spoiling(chunk, hidden, state):
        output = forward(chunk, hidden, state)
        if chunk.unit == unit:
            output = output.clone()
            output.view(-1)[-1] = value
        return output

    stage.forward = spoiling


def spoiled_gradient(stage, unit, value):
    """Make one element of the gradient that a stage hands on for one unit NaN or infinite."""
    forward = stage.forward

    def spoiling(chunk, hidden, state):
        if chunk.unit == unit and hidden is not None:
            hidden.register_hook(lambda gradient: gradient.index_fill(1, torch.tensor([0]), value))
        return forward(chunk, hidden, state)

    stage.forward = spoiling


@pytest.mark.parametrize("value", [NAN, -INFINITE])
@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_nothing_is_found_where_all_is_finite_and_a_forward_where_it_is_not(schedule, virtual, value):
    stages = toy_stages(RANKS * virtual)
    findings, plan = found(stages, schedule, virtual)
    assert findings == [[], []]
    assert first_of(findings, plan) is None
    for stage in stages:
        fresh = toy_stages(RANKS * virtual)
        action = Action.parse(f"{stage.index}F1.1")
        spoiled_forward(fresh[stage.index], action.unit, value)
        findings, plan = found(fresh, schedule, virtual)
        rank, finding = first_of(findings, plan)
        assert (rank, finding.action, finding.what) == (plan.stage_to_rank[stage.index], action, "output")


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_the_backward_that_makes_a_gradient_nan(schedule, virtual):
    stages = toy_stages(RANKS * virtual)
    kind = "I" if schedule.endswith("zb") else "B"
    action = Action.parse(f"1{kind}0.2")
    spoiled_gradient(stages[1], action.unit, NAN)
    rank, finding = first_of(*found(stages, schedule, virtual))
    assert (rank, finding.action, finding.what) == (1, action, "input gradient")
    stages = toy_stages(RANKS * virtual)
    spoiled_gradient(stages[1], action.unit, NAN)
    assert found(stages, schedule, virtual, gradients=False)[0] == [[], []]


def test_a_parameter_whose_gradient_alone_is_nan_is_named():
    stages = toy_stages(RANKS)
    weight = stages[1].head.weight
    calls = []
    weight.register_hook(lambda gradient: gradient * (NAN if calls.append(None) or len(calls) == 2 else 1))
    rank, finding = first_of(*found(stages, "gpipe", 1))
    assert rank == 1
    assert finding.what == "gradient of 1.head.weight"
    assert str(finding.action) == "1B0.1"


def test_of_independent_causes_the_earliest_is_named():
    stages = toy_stages(RANKS)
    spoiled_forward(stages[0], Action.parse("0F1.0").unit, NAN)
    spoiled_forward(stages[1], Action.parse("1F0.1").unit, NAN)
    rank, finding = first_of(*found(stages, "gpipe", 1))
    assert (rank, str(finding.action)) == (1, "1F0.1")
