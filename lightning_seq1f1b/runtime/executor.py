"""Interprets one rank's actions of a plan: the only place where forwards, backwards and messages happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_seq1f1b.runtime.batching import Microbatch
from lightning_seq1f1b.runtime.finite import FiniteCheck
from lightning_seq1f1b.runtime.messages import Messages
from lightning_seq1f1b.runtime.objective import Objective
from lightning_seq1f1b.runtime.position import Position
from lightning_seq1f1b.runtime.split_backward import DeferredGradients, SplitBackward
from lightning_seq1f1b.runtime.stage import MicrobatchState, Stage
from lightning_seq1f1b.runtime.trace import StepTrace, measured
from lightning_seq1f1b.runtime.transport import Transport
from lightning_seq1f1b.runtime.weight_queue import WeightQueue
from lightning_seq1f1b.runtime.wire import Formats, mode
from lightning_seq1f1b.schedule.actions import Action, Kind, Unit
from lightning_seq1f1b.schedule.plan import Plan


class Executor:
    """Runs the actions of one pipeline rank in their order; where backwards are split, W alone may run earlier.

    While the data of the next F or I are not here, and where the next F would pass the plan's activation cap, the
    oldest W that is due runs first. When the plan comes to a W, so many have run.

    Args:
        stages: the stages this rank holds, by stage number.
        transport: this rank's end of the pipeline.
        pipeline_rank: which rank of the plan this is.
        device: where the stages compute.
        position: where it notes the action that it executes.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        transport: Transport,
        pipeline_rank: int,
        device: torch.device,
        position: Position | None = None,
    ) -> None:
        self.stages, self.transport = stages, transport
        self.pipeline_rank, self.device = pipeline_rank, device
        self.position = Position() if position is None else position
        self._formats: dict[object, Formats] = {}

    def run(
        self,
        plan: Plan,
        microbatches: Sequence[Microbatch],
        trace: StepTrace | None = None,
        objective: Objective | None = None,
        loss_scale: Tensor | None = None,
        finite: FiniteCheck | None = None,
    ) -> list[Mapping[str, Tensor]] | None:
        """Execute this rank's actions of one step.

        Gradients are added to the `.grad` of the stages' parameters when the plan trains.

        Args:
            plan: a plan for all ranks; its numbers of microbatches and chunks are those of `microbatches`.
            microbatches: the batch, cut; equal on all ranks.
            trace: collects the times of the compute actions.
            objective: what is asked of the microbatches; None for the model's own loss.
            loss_scale: 0-d, equal on all ranks; all gradients come out multiplied by it. None for 1.
            finite: looks at all that is computed.

        Returns:
            On the rank of the last stage what every microbatch gives, see `MicrobatchState.result`; None elsewhere.

        Raises:
            RuntimeError: when something is still alive after the last action, which is a fault of the plan.
        """
        formats = self._formats.setdefault(mode(self.device), {})
        messages = Messages(plan, self.pipeline_rank, self.transport, formats, microbatches, self.device)
        results = _Step(self, plan, messages, microbatches, trace, objective, loss_scale, finite).run()
        self.position.enter("waiting for the last messages of the step to leave")
        self.transport.finish()
        return results


class _Step:
    """Everything that is alive during one step, and nothing else: it is dropped as a whole at the end."""

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        messages: Messages,
        microbatches: Sequence[Microbatch],
        trace: StepTrace | None,
        objective: Objective | None,
        loss_scale: Tensor | None,
        finite: FiniteCheck | None,
    ) -> None:
        self.stages, self.device, self.position = executor.stages, executor.device, executor.position
        self.plan, self.actions = plan, plan.actions_of(executor.pipeline_rank)
        self.messages, self.microbatches, self.trace, self.objective = messages, microbatches, trace, objective
        self.loss_scale, self.finite = loss_scale, finite
        self.states: dict[tuple[int, int], MicrobatchState] = {}
        self.in_flight: dict[tuple[int, Unit], tuple[Tensor | None, Tensor]] = {}
        self.splits = {
            index: SplitBackward(stage.linears) for index, stage in self.stages.items() if plan.splits_backward
        }
        self.weights = WeightQueue(trace, self.device, self.position, finite)
        self.num_forwards = 0
        self.results: dict[int, Mapping[str, Tensor]] = {}

    def run(self) -> list[Mapping[str, Tensor]] | None:
        handlers = {
            Kind.F: self.forward,
            Kind.B: self.backward,
            Kind.I: self.backward,
            Kind.W: self.weight,
            Kind.SEND_F: self.messages.send,
            Kind.SEND_B: self.messages.send,
            Kind.RECV_F: self.messages.receive,
            Kind.RECV_B: self.messages.receive,
        }
        with torch.set_grad_enabled(self.plan.trains):
            for action in self.actions:
                self.position.enter(action)
                handlers[action.kind](action)
        left = [*self.states, *self.in_flight, *self.messages.left()]
        if left or self.weights:
            raise RuntimeError(
                f"the {self.plan.schedule} plan left {left} and {len(self.weights)} weight gradients behind"
            )
        return [result for _, result in sorted(self.results.items())] or None

    def forward(self, action: Action) -> None:
        stage, unit = self.stages[action.stage], action.unit
        microbatch = self.microbatches[unit.microbatch]
        key = (action.stage, unit.microbatch)
        cap = self.plan.activation_cap
        trained = self.plan.trains_stage(action.stage)
        while trained and self.weights and cap is not None and self.num_forwards - self.weights.done >= cap:
            self.weights.run_oldest()
            self.position.enter(action)
        hidden = None
        if action.stage > 0:
            wanted = self.plan.trains_stage(action.stage - 1)
            hidden = self.taken(Action(Kind.RECV_F, action.stage, unit), action).requires_grad_(wanted)
        if unit.chunk == 0:
            self.states[key] = stage.open(microbatch, training=self.plan.trains, objective=self.objective)
        with torch.set_grad_enabled(trained), measured(self.trace, action), self.deferring(action.stage):
            output = stage.forward(microbatch.chunks[unit.chunk], hidden, self.states[key])
        self.weights.launched()
        if self.finite is not None:
            self.finite.forward(action, output)
        self.num_forwards += trained
        if action.stage < stage.num_stages - 1:
            self.messages.give(Action(Kind.SEND_F, action.stage, unit), output.detach())
        if trained:
            self.in_flight[action.stage, unit] = (hidden, output)
        elif unit.chunk == len(microbatch.chunks) - 1:
            self.close(action)

    def backward(self, action: Action) -> None:
        """B, or I, which leaves what W needs."""
        stage, unit = self.stages[action.stage], action.unit
        key = (action.stage, unit.microbatch)
        hidden, output = self.in_flight.pop((action.stage, unit))
        state, deferred = self.states[key], DeferredGradients()
        is_last = action.stage == stage.num_stages - 1
        received = None if is_last else self.taken(Action(Kind.RECV_B, action.stage, unit), action)
        with measured(self.trace, action), self.deferring(action.stage, deferred):
            # On the last stage this may compute the loss first, which then is part of the backward.
            gradient = state.seed(unit.chunk, self.loss_scale) if is_last else received
            carried, carried_gradients = state.carried(unit.chunk, self.loss_scale)
            roots = [(output, gradient), *zip(carried, carried_gradients, strict=True)]
            roots = [(root, grad) for root, grad in roots if root.requires_grad]
            if roots:
                # Autocast is meant for forwards; the backward follows the dtypes that the forward has chosen.
                with torch.autocast(self.device.type, enabled=False):
                    torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])
        del output, roots, carried, carried_gradients
        if action.kind is Kind.I:
            self.weights.add(Action(Kind.W, action.stage, unit), deferred)
        self.weights.launched()
        if self.finite is not None:
            self.finite.backward(action, None if hidden is None else hidden.grad)
        if hidden is not None and hidden.requires_grad:
            # Without a path to its input (a stage of frozen modules) the gradient is zero.
            sent = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
            self.messages.give(Action(Kind.SEND_B, action.stage, unit), sent)
        if unit.chunk == 0:
            self.close(action)

    def close(self, action: Action) -> None:
        """The microbatch has passed a stage for the last time."""
        state = self.states.pop((action.stage, action.unit.microbatch))
        if action.stage == self.stages[action.stage].num_stages - 1:
            self.results[action.unit.microbatch] = state.result()
            if self.finite is not None:
                self.finite.result(action, self.results[action.unit.microbatch])
        state.close()

    def weight(self, action: Action) -> None:
        self.weights.run_planned()

    def taken(self, receive: Action, consumer: Action) -> Tensor:
        self.weights.fill(lambda: self.messages.is_here(receive))
        self.position.enter(receive)
        tensor = self.messages.take(receive)
        self.position.enter(consumer)
        return tensor

    def deferring(self, stage: int, store: DeferredGradients | None = None) -> AbstractContextManager[None]:
        return self.splits[stage].deferring(store) if self.splits else nullcontext()
