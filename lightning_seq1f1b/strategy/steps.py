"""What a training step does under a pipeline: the whole schedule at the call of the model, and gradients when asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_seq1f1b.runtime.agreement import check_same_loss
from lightning_seq1f1b.runtime.gradients import GradientStash, average_replicas
from lightning_seq1f1b.runtime.objective import Objective
from lightning_seq1f1b.runtime.pipeline import Pipeline
from lightning_seq1f1b.runtime.step_result import StepResult
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.strategy.bridge import bridge
from lightning_seq1f1b.strategy.checkpoints import PipelineCheckpoints
from lightning_seq1f1b.strategy.router_sharing import check_one_microbatch
from lightning_seq1f1b.strategy.supported import callbacks_of, check_gradient_hooks


class PipelineSteps(PipelineCheckpoints):
    """The part of a strategy that runs batches.

    Args:
        num_stages: stages of one replica; None for all processes.
        backend: of torch.distributed; None to choose by the device.
        timeout: how long a rank waits for another one.
        trace: time every forward and backward of a step.
    """

    def __init__(self, num_stages: int | None, backend: str | None, timeout: timedelta, trace: bool) -> None:
        super().__init__(num_stages, backend, timeout)
        self.trace = trace
        self.last_step: StepTrace | None = None
        self._pipeline: Pipeline | None = None
        self._accumulating = self._zeroing_follows = self._loss_checked = False
        self._batch_idx = 0

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
        trace = StepTrace(self.topology.pipeline_rank, self.root_device) if self.trace else None
        stash = GradientStash(self._cut.module.parameters())
        check_gradient_hooks(self._cut.module)
        if objective is None or objective.own_loss:
            check_one_microbatch(self._cut, len(batch["input_ids"]), self._pipeline.cutting.num_microbatches)
        try:
            if training:
                stash.set_aside(keep=not self._zeroing_follows)
            result = self._pipeline.run(batch, training=training, trace=trace, objective=objective)
        except BaseException:
            self._broken = True  # ranks are at different places: no collective can work any more
            raise
        self.last_step = trace
        fresh = stash.take() if training else []
        if not result.trained:
            return result
        assert result.loss is not None, "every training step asks for one"
        return replace(result, loss=bridge(result.loss, fresh))

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
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self.topology.num_replicas > 1 and not self._accumulating:
            average_replicas(module.parameters(), self._process_groups.replica)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

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
