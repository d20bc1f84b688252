"""What a training step does under a pipeline: the whole schedule at the call of the model, and gradients when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_seq1f1b.runtime.agreement import check_same_loss
from lightning_seq1f1b.runtime.copied_gradients import CopiedGradients
from lightning_seq1f1b.runtime.finite import FiniteCheck
from lightning_seq1f1b.runtime.gradients import GradientStash, deliver
from lightning_seq1f1b.runtime.objective import Objective
from lightning_seq1f1b.runtime.pipeline import Pipeline
from lightning_seq1f1b.runtime.replica_gradients import ReplicaAverage
from lightning_seq1f1b.runtime.step_result import StepResult
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.strategy.bridge import bridge
from lightning_seq1f1b.strategy.checkpoints import PipelineCheckpoints
from lightning_seq1f1b.strategy.loss_scale import loss_scale
from lightning_seq1f1b.strategy.router_sharing import check_one_microbatch
from lightning_seq1f1b.strategy.supported import callbacks_of, check_gradient_hooks
from lightning_seq1f1b.strategy.tracing import gather_objects

T = TypeVar("T")


class PipelineSteps(PipelineCheckpoints):
    """The part of a strategy that runs batches.

    Args:
        num_stages: stages of one replica; None for all processes.
        backend: of torch.distributed; None to choose by the device.
        timeout: how long a rank waits for another one.
        trace: time every forward and backward of a step.

    Attributes:
        check_finite: whether a step ends the run when something in it is NaN or infinite.
        trace: as above; it may change between steps.
        last_step: times of this rank in the last step, where it was traced.
        step_watchers: called with the trace of every step as soon as it is launched; with any, all steps are traced.
    """

    check_finite = False

    def __init__(self, num_stages: int | None, backend: str | None, timeout: timedelta, trace: bool) -> None:
        super().__init__(num_stages, backend, timeout)
        self.trace = trace
        self.last_step: StepTrace | None = None
        self.step_watchers: list[Callable[[StepTrace], None]] = []
        self._pipeline: Pipeline | None = None
        self._accumulating = self._zeroing_follows = self._loss_checked = False
        self._batch_idx = 0
        self._delayed: list[Callable[[], None]] | None = None

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Remember where in the accumulation window this batch stands."""
        self._batch_idx = batch_idx

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's; only what it calls is followed by Lightning's zeroing, not what hooks call."""
        self._zeroing_follows = self._about_to_be_zeroed()
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._zeroing_follows = False

    def _step(self, batch: Mapping[str, Tensor], objective: Objective | None = None) -> StepResult:
        """What calling the language model does: the whole pipelined step, forward only where gradients are off."""
        assert self._cut is not None
        assert self._pipeline is not None
        training = torch.is_grad_enabled()
        traced = self.trace or self.step_watchers
        trace = StepTrace(self.topology.pipeline_rank, self.root_device) if traced else None
        stash = GradientStash(self._cut.module.parameters())
        check_gradient_hooks(self._cut.module)
        if objective is None or objective.own_loss:
            check_one_microbatch(self._cut, len(batch["input_ids"]), self._pipeline.cutting.num_microbatches)
        try:
            if training:
                stash.set_aside(keep=not self._zeroing_follows)
            scale = loss_scale(self.precision_plugin, self._num_accumulated, self.root_device) if training else None
            finite = FiniteCheck(self._cut.module, gradients=scale is None) if self.check_finite else None
            result = self._pipeline.run(
                batch, training=training, trace=trace, objective=objective, loss_scale=scale, finite=finite
            )
        except BaseException:
            self._broken = True  # ranks are at different places: no collective can work any more
            if training:
                stash.take()
            raise
        self.position.leave()
        self.last_step = trace
        if trace is not None:
            for watcher in self.step_watchers:
                watcher(trace)
        fresh = stash.take() if training else []
        if not result.trained:
            return result
        assert result.loss is not None, "every training step asks for one"
        then = partial(self._deliver_copied, result.copied)
        return replace(result, loss=bridge(result.loss, fresh, then, scale), copied=())

    def _deliver_copied(self, copied: Sequence[CopiedGradients], factor: Tensor) -> None:
        """Deliver the gradients that several stages share, now or once `backward` has sent off all others."""

        def now() -> None:
            for gradients in copied:
                deliver(gradients.summed(), factor)

        if self._delayed is None:
            now()
        else:
            self._delayed.append(now)

    @property
    def _num_accumulated(self) -> int:
        """By how many batches of a window Lightning divides the loss."""
        module = self.lightning_module
        assert module is not None
        return int(module.trainer.accumulate_grad_batches) if module.automatic_optimization else 1

    def gather_over_stages(self, item: T) -> list[T]:
        """An object that pickles, of every pipeline rank of this replica; called on all of them."""
        return gather_objects(item, self._process_groups.control)

    def _about_to_be_zeroed(self) -> bool:
        """Whether Lightning zeroes the gradients right after this training step, with nobody to see them before.

        Then they are dropped before the pipeline runs, which so does not hold two sets of gradients.
        """
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        if not module.automatic_optimization:
            return False
        watched = is_overridden("optimizer_zero_grad", module) or is_overridden("on_before_zero_grad", module)
        watched |= any(type(c).on_before_zero_grad is not Callback.on_before_zero_grad for c in callbacks_of(trainer))
        return not watched and self._batch_idx % trainer.accumulate_grad_batches == 0

    @property
    def gradient_sets(self) -> int:
        """How many gradients of each weight are held at once: those that accumulate, and those of a running step."""
        module = self.lightning_module
        assert module is not None
        return 1 if module.trainer.accumulate_grad_batches == 1 and self._about_to_be_zeroed() else 2

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Deliver the step's gradients, and average them over the replicas once per optimizer step.

        The averaging stands before `on_after_backward`, which so sees final gradients, as under data parallelism.
        """
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None
        if not closure_loss.requires_grad:
            raise ValueError(
                f"there is nothing to train: the loss of {type(module).__name__} depends on no parameter that requires "
                "a gradient. Unfreeze some of them, or return the model's loss without detaching it"
            )
        if not self._loss_checked:
            check_same_loss(closure_loss, self._process_groups.control)
            self._loss_checked = True
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        average = ReplicaAverage(self._process_groups.replica)
        reduces = self.topology.num_replicas > 1 and not self._accumulating
        self._delayed = [] if reduces else None
        try:
            plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            own, copied = self._in_reducing_order()
            self.position.enter("waiting for gradients of other stages and replicas")
            if reduces:
                average.launch(own)
            for deliver_copied in self._delayed or ():
                deliver_copied()
        finally:
            self._delayed = None
        if reduces:
            average.launch(copied)
        average.finish()
        self.position.leave()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _in_reducing_order(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters that no other stage holds, last layers first, and those whose gradients wait for other stages."""
        assert self._cut is not None
        copied = [*self._cut.tied, *self._cut.outside]
        apart = set(copied)
        return [p for p in reversed(list(self._cut.module.parameters())) if p not in apart], copied

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Entered by Lightning for the batches of an accumulation window before the last."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _fail(self) -> None:
        """Ranks are at different places: no collective can work any more."""
        self._broken = True
