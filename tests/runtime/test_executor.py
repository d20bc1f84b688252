"""The executor against the whole model in one piece: losses, every gradient, and nothing left alive."""

import dataclasses
import functools
import gc
import itertools
import random
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.processes import run_processes
from support.toy_stage import VOCAB, toy_stages

from lightning_seq1f1b.runtime import kv_buffer
from lightning_seq1f1b.runtime.batching import cut_batch
from lightning_seq1f1b.runtime.executor import Executor
from lightning_seq1f1b.runtime.split_backward import DeferredGradients
from lightning_seq1f1b.runtime.topology import Topology, make_groups
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.runtime.transport import BACKWARD, FORWARD, InProcessTransport, Mailbox, ProcessTransport
from lightning_seq1f1b.runtime.weight_queue import WeightQueue
from lightning_seq1f1b.schedule.actions import Kind
from lightning_seq1f1b.schedule.partition import even
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.policies import POLICIES

ROWS, LENGTH = 5, 13


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=generator) < 0.3] = -100
    return {"input_ids": ids, "labels": labels}


def total(results):
    """The batch's loss where the last stage is; None elsewhere."""
    return None if results is None else sum(result["loss"] for result in results)


def run(stages, schedule, num_microbatches, num_chunks, *, num_ranks=None, plan=None, traces=None, transport=None):
    """All ranks as threads; returns the loss of the last stage. One stage on a rank, or dealt in turn."""
    num_ranks = len(stages) if num_ranks is None else num_ranks
    microbatches = cut_batch(batch(), num_microbatches, even(LENGTH, num_chunks))
    if plan is None:
        virtual = len(stages) // num_ranks
        plan = make_plan(schedule, num_ranks, len(microbatches), num_chunks, virtual_stages=virtual)
    mailbox, losses, errors = Mailbox(), {}, []
    device = torch.device("cpu")

    def rank(index: int) -> None:
        own = {stage.index: stage for stage in stages if plan.stage_to_rank[stage.index] == index}
        end = InProcessTransport(mailbox, index, 20.0)
        executor = Executor(own, end if transport is None else transport(end, index), index, device)
        try:
            losses[index] = total(executor.run(plan, microbatches, None if traces is None else traces[index]))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert [index for index, loss in losses.items() if loss is not None] == [num_ranks - 1]
    return losses[num_ranks - 1]


@functools.cache
def whole(num_stages: int):
    """One microbatch, one chunk, the stages' layers in one go: loss and gradients by (stage, name)."""
    stages = toy_stages(num_stages)
    (microbatch,) = cut_batch(batch(), 1, even(LENGTH, 1))
    hidden = None
    for stage in stages:
        hidden = stage(microbatch.chunks[0], hidden, stage.open(microbatch, training=True))
    hidden.backward()
    return hidden.detach(), gradients(stages)


def gradients(stages):
    return {(stage.index, name): p.grad for stage in stages for name, p in stage.named_parameters()}


def cases():
    """Every schedule with one stage on a rank, and those that interleave with several, down to one rank."""
    one, several = [(1, 1), (2, 1), (3, 1), (4, 1)], [(1, 2), (1, 4), (2, 2), (2, 4), (3, 2), (4, 2)]
    for name, policy in POLICIES.items():
        if policy.trains:
            places = one + several if policy.interleaves else one
            # Microbatches and chunks: as few as can be, fewer chunks than ranks, and more.
            sizes = [(1, 1), (5, 1)] if policy.whole_rows else [(1, 1), (1, 5), (3, 2)]
            for place, size in itertools.product(places, sizes):
                yield name, *place, *size


@pytest.mark.parametrize(("schedule", "num_ranks", "virtual_stages", "num_microbatches", "num_chunks"), list(cases()))
def test_equals_the_whole_model(schedule, num_ranks, virtual_stages, num_microbatches, num_chunks):
    num_stages = num_ranks * virtual_stages
    stages = toy_stages(num_stages)
    loss = run(stages, schedule, num_microbatches, num_chunks, num_ranks=num_ranks)
    check(stages, loss)


def check(stages, loss):
    expected_loss, expected = whole(len(stages))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-13, atol=0)
    for key, gradient in gradients(stages).items():
        torch.testing.assert_close(
            gradient, expected[key], rtol=1e-11, atol=1e-14, msg=lambda m, key=key: f"{key}: {m}"
        )


def test_forward_only_gives_the_loss_and_no_gradient():
    stages = toy_stages(3)
    torch.testing.assert_close(run(stages, "forward", 2, 4), whole(3)[0])
    assert all(gradient is None for gradient in gradients(stages).values())


def test_a_frozen_stage_is_passed_by_zeros_where_nothing_flows_and_trains_the_rest():
    _, expected = whole(3)
    stages = toy_stages(3)
    stages[1].requires_grad_(False)
    run(stages, "seq1f1b", 2, 3)
    for (index, name), gradient in gradients(stages).items():
        if index == 1:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, expected[index, name], rtol=1e-11, atol=1e-14)


def test_a_frozen_first_stage_needs_no_backward_of_its_own():
    _, expected = whole(2)
    stages = toy_stages(2)
    stages[0].requires_grad_(False)
    run(stages, "seq1f1b", 2, 3)
    assert all(p.grad is None for p in stages[0].parameters())
    for name, parameter in stages[1].named_parameters():
        torch.testing.assert_close(parameter.grad, expected[1, name], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize(
    ("schedule", "num_ranks"),
    [("seq1f1b", 4), ("seq1f1b_zb", 4), ("gpipe", 4), ("interleaved_seq1f1b", 2), ("interleaved_seq1f1b_zb", 2)],
)
def test_stages_before_the_first_trained_one_run_forwards_alone(schedule, num_ranks, first, monkeypatch):
    _, expected = whole(4)
    stages = toy_stages(4)
    for stage in stages[:first]:
        stage.requires_grad_(False)
    plan = make_plan(schedule, num_ranks, 3, 2, virtual_stages=4 // num_ranks, first_trained_stage=first)
    buffers, traces = watch_buffers(monkeypatch), [StepTrace(rank, torch.device("cpu")) for rank in range(num_ranks)]
    run(stages, schedule, 3, 2, num_ranks=num_ranks, plan=plan, traces=traces)
    for (index, name), gradient in gradients(stages).items():
        if index < first:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, expected[index, name], rtol=1e-11, atol=1e-14)
    done = [event.action for trace in traces for event in trace.events]
    assert {action.stage for action in done if action.kind is not Kind.F} == set(range(first, 4))
    assert not any(buffer.nbytes() for buffer in buffers)


def watch_buffers(monkeypatch):
    """Every KV buffer that is made from now on."""
    buffers, init = [], kv_buffer.KVBuffer.__init__

    def watched(self, length):
        buffers.append(self)
        init(self, length)

    monkeypatch.setattr(kv_buffer.KVBuffer, "__init__", watched)
    return buffers


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("schedule", ["interleaved_seq1f1b", "interleaved_seq1f1b_zb", "forward"])
def test_nothing_is_alive_after_a_step(schedule, virtual_stages, monkeypatch):
    buffers, tensors = [], []
    buffer = kv_buffer.KVBuffer
    init, write, accumulator = buffer.__init__, buffer._write, buffer._accumulator
    keep = DeferredGradients.keep

    def watched_init(self, length):
        buffers.append(weakref.ref(self))
        init(self, length)

    def watched_write(self, slot, *written):
        write(self, slot, *written)
        tensors.append(weakref.ref(self._values[slot]))

    def watched_accumulator(self, slot):
        gradient = accumulator(self, slot)
        tensors.append(weakref.ref(gradient))
        return gradient

    def watched_keep(self, use, value, gradient):
        keep(self, use, value, gradient)
        tensors.extend(weakref.ref(tensor) for tensor in (value, gradient))

    monkeypatch.setattr(DeferredGradients, "keep", watched_keep)
    monkeypatch.setattr(buffer, "__init__", watched_init)
    monkeypatch.setattr(buffer, "_write", watched_write)
    monkeypatch.setattr(buffer, "_accumulator", watched_accumulator)
    stages = toy_stages(2 * virtual_stages)
    activations = []
    for stage in stages:
        stage.forward = watch_output(stage.forward, activations)
    gc.disable()  # reference counting alone must free them: a cycle would hold activations until some later collection
    try:
        run(stages, schedule, 2, 3, num_ranks=2)
        alive = [reference() for reference in (*buffers, *tensors, *activations) if reference() is not None]
    finally:
        gc.enable()
    assert len(buffers) == 4 * virtual_stages
    assert tensors
    assert activations
    assert alive == []


def watch_output(forward, activations):
    def watched(*args):
        output = forward(*args)
        activations.append(weakref.ref(output))
        return output

    return watched


class Late:
    """An arrival that says what it is told to of being here, and takes its time."""

    def __init__(self, arrival, is_here, latency_s):
        self._arrival, self._is_here, self._latency_s = arrival, is_here, latency_s

    def is_here(self):
        return self._is_here(self._arrival)

    def wait(self):
        time.sleep(self._latency_s())
        return self._arrival.wait()


class LateTransport:
    def __init__(self, end, is_here, latency_s=lambda: 0.0):
        self._end, self._is_here, self._latency_s = end, is_here, latency_s
        self.send, self.finish = end.send, end.finish

    def receive(self, *args):
        return Late(self._end.receive(*args), self._is_here, self._latency_s)


def at_random(seed):
    """Messages that are seen, and come, late by chance; another chance on each rank."""

    def transport(end, rank):
        chance = random.Random(100 * seed + rank)

        def is_here(arrival):
            return chance.random() < 0.3 and arrival.is_here()

        return LateTransport(end, is_here, lambda: chance.choice([0.0, 0.0, 0.001, 0.003]))

    return transport


def traced(stages, schedule, num_ranks, transport, plan=None):
    traces = [StepTrace(rank, torch.device("cpu")) for rank in range(num_ranks)]
    plan = plan or make_plan(schedule, num_ranks, 3, 4, virtual_stages=len(stages) // num_ranks)
    check(stages, run(stages, schedule, 3, 4, num_ranks=num_ranks, plan=plan, traces=traces, transport=transport))
    return plan, [[event.action for event in trace.events] for trace in traces]


def most_held(actions):
    """The most units that are between their F and their W, where `actions` have run in this order."""
    held = most = 0
    for action in actions:
        held += {Kind.F: 1, Kind.W: -1}.get(action.kind, 0)
        most = max(most, held)
    return most


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("schedule", "num_ranks", "virtual_stages"),
    [("seq1f1b_zb", 3, 1), ("interleaved_seq1f1b_zb", 3, 2), ("interleaved_seq1f1b_zb", 2, 4)],
)
def test_no_order_of_arrivals_changes_the_result_or_more_than_the_places_of_w(
    schedule, num_ranks, virtual_stages, seed
):
    plan, ran = traced(toy_stages(num_ranks * virtual_stages), schedule, num_ranks, at_random(seed))
    moved = 0
    for actions, planned in zip(ran, plan.compute, strict=True):
        assert sorted(actions) == sorted(planned)
        assert [a for a in actions if a.kind is not Kind.W] == [a for a in planned if a.kind is not Kind.W]
        first, then = ([a[1:] for a in actions if a.kind is kind] for kind in (Kind.I, Kind.W))
        assert first == then
        assert most_held(actions) <= plan.activation_cap
        place = {action: index for index, action in enumerate(actions)}
        for index, action in enumerate(planned):
            if action.kind is Kind.W:
                assert place[action] > place[action._replace(kind=Kind.I)]
                moved += place[action] < index
    assert moved > 0


def test_fused_schedules_keep_their_order_whatever_arrives():
    plan, ran = traced(toy_stages(6), "interleaved_seq1f1b", 3, at_random(0))
    assert ran == [list(actions) for actions in plan.compute]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_w_stays_where_it_is_planned_when_nothing_is_late(num_ranks):
    def always(end, rank):
        return LateTransport(end, lambda arrival: True)

    plan, ran = traced(toy_stages(4), "interleaved_seq1f1b_zb", num_ranks, always)
    assert ran == [list(actions) for actions in plan.compute]


def test_w_fills_every_wait_for_a_message():
    def never(end, rank):
        return LateTransport(end, lambda arrival: False)

    plan, ran = traced(toy_stages(4), "interleaved_seq1f1b_zb", 2, never)
    for actions in ran:
        due = 0
        for action in actions:
            first = 0 if action.kind is Kind.F else plan.num_stages - 1
            if action.kind is Kind.W:
                due -= 1
            elif action.stage != first:
                assert due == 0
            due += action.kind is Kind.I


def with_late_weights(plan, cap):
    """All W at the end of their ranks' rows."""
    rows = [
        [code for code in row if plan.codes.decode(code).kind is not Kind.W]
        + [code for code in row if plan.codes.decode(code).kind is Kind.W]
        for row in plan.rows
    ]
    return dataclasses.replace(plan, rows=tuple(map(tuple, rows)), activation_cap=cap)


@pytest.mark.parametrize(("cap", "most"), [(4, 4), (6, 6), (None, 12)])
def test_a_forward_that_would_pass_the_cap_waits_for_w(cap, most):
    plan = with_late_weights(make_plan("seq1f1b_zb", 1, 3, 4), cap)
    _, (actions,) = traced(toy_stages(1), "", 1, None, plan)
    assert most_held(actions) == most


def test_after_the_input_gradient_only_what_w_needs_is_alive(monkeypatch):
    stages, outputs, kept, seen = toy_stages(2), [], [], []
    for stage in stages:
        stage.forward = watch_output(stage.forward, outputs)
    keep, run_planned = DeferredGradients.keep, WeightQueue.run_planned

    def watched_keep(self, use, value, gradient):
        keep(self, use, value, gradient)
        kept.append(weakref.ref(gradient))

    def watched_run(self):
        seen.append(([o for o in outputs if o() is not None], sum(g() is not None for g in kept)))
        run_planned(self)

    monkeypatch.setattr(DeferredGradients, "keep", watched_keep)
    monkeypatch.setattr(WeightQueue, "run_planned", watched_run)
    gc.disable()
    try:
        plan = with_late_weights(make_plan("interleaved_seq1f1b_zb", 1, 2, 3, virtual_stages=2), None)
        run(stages, "", 2, 3, num_ranks=1, plan=plan)
    finally:
        gc.enable()
    # Three linear layers on the first stage, four on the last, six units.
    assert seen[0] == ([], 6 * 7)
    assert [alive for alive, _ in seen] == [[]] * 12
    assert all(gradient() is None for gradient in kept)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_an_error_in_a_split_step_leaves_the_modules_as_they_were(fails_in):
    stages = toy_stages(4)

    def fail(*args):
        raise RuntimeError("the layer's own error")

    layer = stages[2].layers[0]
    if fails_in == "forward":
        layer.register_forward_hook(fail)
    else:
        layer.register_full_backward_hook(fail)
    microbatches = cut_batch(batch(), 1, even(LENGTH, 2))
    plan = make_plan("interleaved_seq1f1b_zb", 1, 1, 2, virtual_stages=4)
    executor = Executor(
        {stage.index: stage for stage in stages}, InProcessTransport(Mailbox(), 0, 0.1), 0, torch.device("cpu")
    )
    with pytest.raises(RuntimeError, match="the layer's own error"):
        executor.run(plan, microbatches)
    assert not any("forward" in vars(module) for stage in stages for module in stage.modules())


def between_processes(rank):
    """Two steps, of which the second knows the formats; returns losses and gradients of the stages of this rank."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    groups = make_groups(Topology(rank, 2, 2), timedelta(seconds=60))
    transport = ProcessTransport((0, 1), {FORWARD: groups.forward, BACKWARD: groups.backward}, torch.device("cpu"))
    stages = {stage.index: stage for stage in toy_stages(6) if stage.index % 2 == rank}
    executor = Executor(stages, transport, rank, torch.device("cpu"))
    losses = []
    for num_microbatches in (2, 5):
        for stage in stages.values():
            stage.zero_grad()
        plan = make_plan("interleaved_seq1f1b_zb", 2, num_microbatches, 3, virtual_stages=3)
        losses.append(total(executor.run(plan, cut_batch(batch(), num_microbatches, even(LENGTH, 3)))))
    return losses, {(index, name): p.grad for index, stage in stages.items() for name, p in stage.named_parameters()}


def test_processes_with_three_stages_each_equal_the_whole_model():
    results = run_processes(between_processes, 2, timeout_s=60)
    expected_loss, expected = whole(6)
    assert results[0][0] == [None, None]
    torch.testing.assert_close(results[1][0], [expected_loss, expected_loss])
    found = {**results[0][1], **results[1][1]}
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-11, atol=1e-14)


def test_a_stage_that_raises_is_not_swallowed():
    stages = toy_stages(2)

    def fail(*args):
        raise RuntimeError("the layer's own error")

    stages[0].forward = fail
    with pytest.raises((RuntimeError, TimeoutError), match="the layer's own error"):
        run_first_only(stages)


def run_first_only(stages):
    microbatches = cut_batch(batch(), 1, even(LENGTH, 2))
    executor = Executor({0: stages[0]}, InProcessTransport(Mailbox(), 0, 0.1), 0, torch.device("cpu"))
    executor.run(make_plan("seq1f1b", 2, 1, 2), microbatches)
