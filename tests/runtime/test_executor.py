"""The executor against the whole model in one piece: losses, every gradient, and nothing left alive."""

import gc
import itertools
import threading
import weakref

import pytest
import torch
from support.toy_stage import VOCAB, ToyStage, toy_stages

from lightning_seq1f1b.runtime import kv_buffer
from lightning_seq1f1b.runtime.batching import cut_batch
from lightning_seq1f1b.runtime.executor import Executor
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.runtime.transport import InProcessTransport, Mailbox
from lightning_seq1f1b.schedule.partition import even
from lightning_seq1f1b.schedule.plan import make_plan

ROWS, LENGTH = 5, 13


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=generator) < 0.3] = -100
    return {"input_ids": ids, "labels": labels}


def run(stages: list[ToyStage], schedule: str, num_microbatches: int, num_chunks: int, traces=None):
    """All ranks as threads; returns the loss of the last stage."""
    microbatches = cut_batch(batch(), num_microbatches, even(LENGTH, num_chunks))
    plan = make_plan(schedule, len(stages), len(microbatches), num_chunks)
    mailbox, losses, errors = Mailbox(), {}, []
    device = torch.device("cpu")

    def rank(index: int) -> None:
        executor = Executor({index: stages[index]}, InProcessTransport(mailbox, index, 20.0), index, device)
        try:
            losses[index] = executor.run(plan, microbatches, None if traces is None else traces[index])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert [index for index, loss in losses.items() if loss is not None] == [len(stages) - 1]
    return losses[len(stages) - 1]


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


@pytest.mark.parametrize("schedule", ["seq1f1b", "gpipe"])
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "num_chunks"), list(itertools.product([1, 2, 3, 4], [1, 2, 5], [1, 2, 5]))
)
def test_equals_the_whole_model(schedule, num_stages, num_microbatches, num_chunks):
    expected_loss, expected = whole(num_stages)
    stages = toy_stages(num_stages)
    loss = run(stages, schedule, num_microbatches, num_chunks)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-13, atol=0)
    for key, gradient in gradients(stages).items():
        torch.testing.assert_close(
            gradient, expected[key], rtol=1e-11, atol=1e-14, msg=lambda m, key=key: f"{key}: {m}"
        )


def test_1f1b_equals_the_whole_model():
    expected_loss, expected = whole(3)
    stages = toy_stages(3)
    torch.testing.assert_close(run(stages, "1f1b", 4, 1), expected_loss)
    for key, gradient in gradients(stages).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-11, atol=1e-14)


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


@pytest.mark.parametrize("schedule", ["seq1f1b", "forward"])
def test_nothing_is_alive_after_a_step(schedule, monkeypatch):
    buffers, tensors = [], []
    buffer = kv_buffer.KVBuffer
    init, write, accumulator = buffer.__init__, buffer._write, buffer._accumulator

    def watched_init(self, length):
        buffers.append(weakref.ref(self))
        init(self, length)

    def watched_write(self, slot, start, tensor):
        write(self, slot, start, tensor)
        tensors.append(weakref.ref(self._values[slot]))

    def watched_accumulator(self, slot):
        gradient = accumulator(self, slot)
        tensors.append(weakref.ref(gradient))
        return gradient

    monkeypatch.setattr(buffer, "__init__", watched_init)
    monkeypatch.setattr(buffer, "_write", watched_write)
    monkeypatch.setattr(buffer, "_accumulator", watched_accumulator)
    stages = toy_stages(2)
    activations = []
    for stage in stages:
        stage.forward = watch_output(stage.forward, activations)
    gc.disable()  # reference counting alone must free them: a cycle would hold activations until some later collection
    try:
        run(stages, schedule, 2, 3)
        alive = [reference() for reference in (*buffers, *tensors, *activations) if reference() is not None]
    finally:
        gc.enable()
    assert len(buffers) == 4
    assert tensors
    assert activations
    assert alive == []


def watch_output(forward, activations):
    def watched(*args):
        output = forward(*args)
        activations.append(weakref.ref(output))
        return output

    return watched


def test_the_trace_holds_every_compute_action_in_order():
    traces = [StepTrace(rank, torch.device("cpu")) for rank in range(3)]
    run(toy_stages(3), "seq1f1b", 2, 3, traces)
    plan = make_plan("seq1f1b", 3, 2, 3)
    for rank, trace in enumerate(traces):
        assert [event.action for event in trace.events] == list(plan.compute[rank])
        times = [time for event in trace.events for time in (event.start, event.end)]
        assert times == sorted(times)


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
