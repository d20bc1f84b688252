"""The callback that shows how well the pipeline runs."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lightning_seq1f1b.callbacks.memory import peak_bytes
from lightning_seq1f1b.callbacks.peak_speed import peak_flops
from lightning_seq1f1b.callbacks.pipeline_report import Run, Seen, report
from lightning_seq1f1b.callbacks.step_clock import StepClock
from lightning_seq1f1b.callbacks.timelines import write_timeline
from lightning_seq1f1b.runtime.clocks import machine
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.strategy.seq1f1b import Seq1F1BStrategy


class PipelineMonitor(Callback):
    """Logs how well the pipeline runs, and writes timelines of single steps.

    With `self.log`, so every logger of the Trainer shows it, equal on all ranks, as means over the steps since the last
    time:

    - `pipeline/bubble`: the share of a pipelined step that the ranks are idle, from the first start to the last end of
      an action on any rank; `pipeline/bubble/rank_0` and so on for each pipeline rank.
    - `pipeline/step_seconds`: time of an optimizer step, from the end of one to the end of the next, with waiting for
      data and without validation and checkpoints; `pipeline/data_seconds`: how much of it the slowest rank waited for
      the next batch.
    - `pipeline/tokens_per_second`: tokens of all replicas without padding, over that time, also as `tokens/s` in the
      progress bar; `pipeline/supervised_tokens_per_second`: those that have a label.
    - `pipeline/mfu`: model FLOPs of forward and backward over what the devices could reach in that time. What is
      computed again in the backward does not count, nor do gradients of weights that are not trained. Left out where
      the device's peak is not known.
    - `pipeline/peak_memory_gib/rank_0` and so on: the most memory that tensors have held on an accelerator since the
      program started, or the process where it computes on the CPU.

    Args:
        every_n_steps: How many optimizer steps are one report; by default the Trainer's `log_every_n_steps`, and a
            multiple of it.
        timeline_every_n_steps: After so many optimizer steps the measured actions of one step of all ranks are written
            to `timelines/step-00000100.json` in the logger's directory, or without one in `default_root_dir`, to be
            drawn by `lightning-seq1f1b schedule draw --measured FILE`. Never by default.
        peak_tflops: TFLOP/s that one device can reach, for the MFU. By default that of some GPUs in 16 bits.

    Raises:
        ValueError: A number is out of range, or, in `setup`, the strategy is another one, or the loggers would not get
            what is logged.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        timeline_every_n_steps: int | None = None,
        peak_tflops: float | None = None,
    ) -> None:
        super().__init__()
        numbers = {
            "every_n_steps": every_n_steps,
            "timeline_every_n_steps": timeline_every_n_steps,
            "peak_tflops": peak_tflops,
        }
        for name, number in numbers.items():
            if number is not None and not number > 0:
                raise ValueError(f"{name} must be positive, or left out, not {number!r}")
        self.every_n_steps, self.timeline_every_n_steps = every_n_steps, timeline_every_n_steps
        self.peak_tflops = peak_tflops
        self._watched: Seq1F1BStrategy | None = None
        self._running: deque[StepTrace] = deque()
        self._last: StepTrace | None = None

    # ---- the run ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what cannot work."""
        if not isinstance(trainer.strategy, Seq1F1BStrategy):
            raise ValueError(
                f"PipelineMonitor watches the stages of Seq1F1BStrategy, but the Trainer has "
                f"{type(trainer.strategy).__name__}: leave the callback out, or pass strategy='seq1f1b'"
            )
        every = _log_every_n_steps(trainer)
        if self.every_n_steps is not None and every and trainer.loggers and self.every_n_steps % every:
            raise ValueError(
                f"PipelineMonitor(every_n_steps={self.every_n_steps}) is no multiple of the Trainer's "
                f"log_every_n_steps={every}: loggers are given nothing in other steps; change one of them"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start to watch."""
        strategy = trainer.strategy
        assert isinstance(strategy, Seq1F1BStrategy)
        self._stop()
        self._machine, self._every = machine(), self.every_n_steps or _log_every_n_steps(trainer) or 50
        self._seen, self._clock = Seen(self._machine), StepClock(trainer)
        self._is_first, self._share = True, _trained_share(strategy, pl_module)
        self._peak = peak_flops(strategy.root_device, str(trainer.precision))
        if self.peak_tflops is not None:
            self._peak = 1e12 * self.peak_tflops
        self._directory: Path | None = None
        if self.timeline_every_n_steps is not None:
            self._directory = Path(trainer.log_dir or trainer.default_root_dir) / "timelines"
        self._watched = strategy
        strategy.step_watchers.append(self._step_ran)
        self._clock.start()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What happens between epochs is no training, nor is validation, which may come before any."""
        if self._watched is not None:
            self._clock.interrupt()

    on_validation_start = on_train_epoch_start

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Nor is saving."""
        if self._watched is not None:
            self._clock.interrupt()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note when the batch has come."""
        self._clock.batch_begins()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report and write, where it is time to."""
        loop: Any = trainer.fit_loop
        stepped = not loop._should_accumulate()
        step = loop.epoch_loop._batches_that_stepped + 1  # by which the Trainer decides what reaches the loggers
        reports = stepped and step % self._every == 0
        every = self.timeline_every_n_steps
        while self._running and (reports or self._running[0].is_over):
            self._count(self._running.popleft())
        self._clock.batch_ends()
        self._seen.steps += stepped
        if reports:
            self._report(pl_module)
        elif self._is_first and stepped:  # the first step connects processes, plans and compiles
            self._forget()
        self._is_first = self._is_first and not stepped
        if every is not None and stepped and step % every == 0 and self._last is not None:
            assert self._watched is not None
            assert self._directory is not None
            write_timeline(self._directory / f"step-{step:08d}.json", self._watched, self._last)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop to watch."""
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop to watch."""
        self._stop()

    def _stop(self) -> None:
        if self._watched is not None:
            self._watched.step_watchers.remove(self._step_ran)
            self._clock.stop()
        self._watched = self._last = None
        self._running.clear()

    # ---- counting --------------------------------------------------------------------------------------------------

    def _step_ran(self, trace: StepTrace) -> None:
        if trace.plan is not None and trace.plan.trains:
            self._running.append(trace)
            self._last = trace

    def _count(self, trace: StepTrace) -> None:
        """Add a step that is over; its times can be read without waiting."""
        seen, events, load = self._seen, trace.events, trace.load
        assert load is not None
        assert trace.began is not None
        start, end = (float(events[0].start), float(events[-1].end)) if events else (trace.began, trace.began)
        seen.runs.append(Run(trace.began, start, end, trace.busy_seconds))
        seen.tokens += int(load.tokens)
        seen.supervised += int(load.supervised)
        flops = load.flops
        seen.flops += flops.forward + flops.input_grad + self._share * flops.weight_grad

    def _report(self, module: L.LightningModule) -> None:
        strategy, seen = self._watched, self._seen
        assert strategy is not None
        seen.seconds, seen.data_seconds = self._clock.seconds, self._clock.data_seconds
        seen.peak_bytes = peak_bytes(strategy.root_device)
        ranks = strategy.gather_over_stages(seen)
        replicas = strategy.topology.num_replicas

        def reduce(numbers: list[float], by: str) -> list[float]:
            if replicas == 1:
                return numbers
            tensor = torch.tensor(numbers, dtype=torch.float64, device=strategy.root_device)
            joined: list[float] = strategy.reduce(tensor, reduce_op=by).tolist()
            return joined

        metrics = report(ranks, reduce, replicas, self._peak)
        module.log_dict(metrics)
        module.log("tokens/s", metrics["pipeline/tokens_per_second"], prog_bar=True, logger=False)
        self._forget()

    def _forget(self) -> None:
        self._seen = Seen(self._machine)
        self._running.clear()
        self._clock.clear()


def _log_every_n_steps(trainer: L.Trainer) -> int:
    return int(trainer.log_every_n_steps)  # type: ignore[attr-defined]  # the class does not declare it


def _trained_share(strategy: Seq1F1BStrategy, module: L.LightningModule) -> float:
    """The share of the whole model's weights that are trained."""
    with strategy.whole():
        parameters = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return sum(count for count, trained in parameters if trained) / max(sum(count for count, _ in parameters), 1)
