"""Interprets one rank's actions of a plan: the only place where forwards, backwards and messages happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from lightning_seq1f1b.runtime.batching import Microbatch
from lightning_seq1f1b.runtime.departures import Departures
from lightning_seq1f1b.runtime.stage import MicrobatchState, Stage
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.runtime.transport import BACKWARD, FORWARD, Arrival, Transport
from lightning_seq1f1b.runtime.wire import WireFormat, mode
from lightning_seq1f1b.schedule.actions import Action, Kind, Unit
from lightning_seq1f1b.schedule.plan import Plan


class Executor:
    """Runs the actions of one pipeline rank.

    Args:
        stages: the stages this rank holds, by stage number.
        transport: this rank's end of the pipeline.
        pipeline_rank: which rank of the plan this is.
        device: where the stages compute.
    """

    def __init__(
        self, stages: Mapping[int, Stage], transport: Transport, pipeline_rank: int, device: torch.device
    ) -> None:
        self.stages, self.transport = stages, transport
        self.pipeline_rank, self.device = pipeline_rank, device
        self._formats: dict[object, WireFormat] = {}

    def run(self, plan: Plan, microbatches: Sequence[Microbatch], trace: StepTrace | None = None) -> Tensor | None:
        """Execute this rank's actions of one step.

        Gradients are added to the `.grad` of the stages' parameters when the plan trains.

        Args:
            plan: a plan for all ranks; its numbers of microbatches and chunks are those of `microbatches`.
            microbatches: the batch, cut; equal on all ranks.
            trace: collects the times of the compute actions.

        Returns:
            On the rank of the last stage the batch's loss, a 0-d tensor without autograd; None elsewhere.

        Raises:
            RuntimeError: when something is still alive after the last action, which is a fault of the plan.
        """
        return _Step(self, plan, microbatches, trace).run()


class _Step:
    """Everything that is alive during one step, and nothing else: it is dropped as a whole at the end."""

    def __init__(
        self, executor: Executor, plan: Plan, microbatches: Sequence[Microbatch], trace: StepTrace | None
    ) -> None:
        self.stages, self.transport, self.device = executor.stages, executor.transport, executor.device
        self.formats, self.mode = executor._formats, mode(executor.device)
        self.plan, self.actions = plan, plan.actions[executor.pipeline_rank]
        self.microbatches, self.trace = microbatches, trace
        self.states: dict[tuple[int, int], MicrobatchState] = {}
        self.in_flight: dict[tuple[int, Unit], tuple[Tensor | None, Tensor]] = {}
        self.outgoing: dict[Action, Tensor] = {}
        self.arriving: dict[Action, Arrival] = {}
        self.unposted: list[Action] = []
        self.departures = Departures(plan)
        self.loss: Tensor | None = None
        self.handlers = {
            Kind.F: self.forward,
            Kind.B: self.backward,
            Kind.SEND_F: self.send,
            Kind.SEND_B: self.send,
            Kind.RECV_F: self.post_receive,
            Kind.RECV_B: self.post_receive,
        }

    def run(self) -> Tensor | None:
        with torch.set_grad_enabled(self.plan.trains):
            for action in self.actions:
                self.handlers[action.kind](action)
            self.transport.finish()
        stores: tuple[Mapping[object, object], ...] = (self.states, self.in_flight, self.outgoing, self.arriving)  # type: ignore[assignment]
        if any(stores):
            raise RuntimeError(f"the {self.plan.schedule} plan left {[list(store) for store in stores]} behind")
        return self.loss

    # ---- compute -------------------------------------------------------------------------------------------------

    def forward(self, action: Action) -> None:
        stage, unit = self.stages[action.stage], action.unit
        microbatch = self.microbatches[unit.microbatch]
        key = (action.stage, unit.microbatch)
        hidden = None
        if action.stage > 0:
            hidden = self.received(Action(Kind.RECV_F, action.stage, unit)).requires_grad_(self.plan.trains)
        if unit.chunk == 0:
            self.states[key] = stage.open(microbatch, training=self.plan.trains)
        with self.measure(action):
            output = stage.forward(microbatch.chunks[unit.chunk], hidden, self.states[key])
        if action.stage == stage.num_stages - 1:
            # Sums in float32 at least: under bf16-true a bfloat16 sum would lose the small chunks.
            loss = output.detach().to(torch.promote_types(output.dtype, torch.float32))
            self.loss = loss if self.loss is None else self.loss + loss
        else:
            self.outgoing[Action(Kind.SEND_F, action.stage, unit)] = output.detach()
        if self.plan.trains:
            self.in_flight[action.stage, unit] = (hidden, output)
        elif unit.chunk == self.plan.num_chunks - 1:
            self.states.pop(key).close()

    def backward(self, action: Action) -> None:
        stage, unit = self.stages[action.stage], action.unit
        key = (action.stage, unit.microbatch)
        hidden, output = self.in_flight.pop((action.stage, unit))
        gradient = None
        if action.stage < stage.num_stages - 1:
            gradient = self.received(Action(Kind.RECV_B, action.stage, unit))
        state = self.states[key]
        with self.measure(action):
            carried, carried_gradients = state.carried(unit.chunk)
            roots = [(output, gradient), *zip(carried, carried_gradients, strict=True)]
            roots = [(root, grad) for root, grad in roots if root.requires_grad]
            if roots:
                # Autocast is meant for forwards; the backward follows the dtypes that the forward has chosen.
                with torch.autocast(self.device.type, enabled=False):
                    torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])
        del output, roots, carried, carried_gradients
        if hidden is not None:
            # Without a path to its input (a stage of frozen modules) the gradient is zero.
            sent = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
            self.outgoing[Action(Kind.SEND_B, action.stage, unit)] = sent
        if unit.chunk == 0:
            self.states.pop(key).close()

    def measure(self, action: Action):  # type: ignore[no-untyped-def]
        return nullcontext() if self.trace is None else self.trace.measure(action)

    # ---- messages ------------------------------------------------------------------------------------------------

    def send(self, action: Action) -> None:
        tensor = self.outgoing.pop(action)
        if action.kind is Kind.SEND_F:
            boundary, destination, direction = action.stage, action.stage + 1, FORWARD
            self.announce(boundary, tensor)
        else:
            destination, direction = action.stage - 1, BACKWARD
        departure = self.transport.send(tensor, self.plan.stage_to_rank[destination], direction)
        self.departures.add(action, departure)

    def announce(self, boundary: int, tensor: Tensor) -> None:
        """Tell the next stage the format before the first activation of this mode, and hold later ones to it."""
        form, key = WireFormat.of(tensor), (boundary, self.mode)
        if key not in self.formats:
            self.formats[key] = form
            self.transport.send(form.encode(self.device), self.plan.stage_to_rank[boundary + 1], FORWARD)
            for receive in self.unposted:
                self.post_receive(receive)
            self.unposted.clear()
        elif self.formats[key] != form:
            raise RuntimeError(f"stage {boundary} gave {form}, but announced {self.formats[key]}")

    def post_receive(self, action: Action) -> None:
        """Start a receive; a gradient's waits for the stage's first output where its format is not known yet."""
        boundary = action.stage - 1 if action.kind is Kind.RECV_F else action.stage
        source = boundary if action.kind is Kind.RECV_F else boundary + 1
        direction = FORWARD if action.kind is Kind.RECV_F else BACKWARD
        source_rank = self.plan.stage_to_rank[source]
        key = (boundary, self.mode)
        if key not in self.formats:
            if action.kind is Kind.RECV_B:
                self.unposted.append(action)
                return
            header = self.transport.receive((2,), torch.int64, source_rank, FORWARD).wait()
            self.formats[key] = WireFormat.decode(header)
        form, microbatch = self.formats[key], self.microbatches[action.unit.microbatch]
        shape = (microbatch.rows, microbatch.chunks[action.unit.chunk].span.length, form.hidden_size)
        self.arriving[action] = self.transport.receive(shape, form.dtype, source_rank, direction)

    def received(self, action: Action) -> Tensor:
        tensor = self.arriving.pop(action).wait()
        self.departures.release(action)
        return tensor
