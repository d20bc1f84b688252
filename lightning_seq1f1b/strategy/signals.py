"""Signals are honoured between batches, on all ranks together, whichever rank they have reached.

Lightning's own handlers run where the signal arrives, which may be between a message and its answer: one saves a
checkpoint, another one waits for a broadcast. Here a handler only notes the signal. Rank 0 is told of it, and at the
start of every training batch Lightning has rank 0 tell all ranks whether to stop: that one broadcast carries what is to
be done.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_seq1f1b.strategy.stopping import StopRequests


class BatchSignals:
    """The signals of one run of a Trainer on several processes.

    Args:
        trainer: whose run this is.
        device: of this process.
        decides: whether this is rank 0.
        splits_data: whether there are several replicas.
    """

    def __init__(self, trainer: pl.Trainer, device: torch.device, *, decides: bool, splits_data: bool) -> None:
        self._trainer, self._device, self._splits_data = trainer, device, splits_data
        handled = {signal.SIGINT, signal.SIGTERM}
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            handled.add(environment.requeue_signal or signal.SIGUSR1)
        self.requests = StopRequests(handled, decides=decides)
        self.stops_together = False
        self._connector: Any = trainer._signal_connector
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop
        self._replaced = (
            (self._connector, "_sigterm_notifier_fn", self._note),
            (self._connector, "_slurm_sigusr_handler_fn", self._note),
            (self._epoch_loop, "_broadcast_sigterm_tensor", self.honour),
        )
        self._wakeup_before: int | None = None
        self._fits = trainer.state.fn == TrainerFn.FITTING
        if self._fits:
            # Before Lightning registers its handlers, which come from these attributes.
            for owner, name, ours in self._replaced:
                vars(owner)[name] = ours

    def take_interrupts(self, wake_handle: int) -> None:
        """From now on an interrupt waits for the end of the batch; called when training starts.

        Args:
            wake_handle: where the system is to write the numbers of signals, for a thread that then ends a process
                whose main thread hangs.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            before = signal.set_wakeup_fd(wake_handle, warn_on_full_buffer=False)
            if before != -1:  # somebody else's, who needs it
                signal.set_wakeup_fd(before)
                return
            self._wakeup_before, self.requests.hears_directly = before, True
            signal.signal(signal.SIGINT, self._note)

    def honour(self) -> None:
        """Do together what any rank was asked for; called on all ranks between batches.

        Raises:
            KeyboardInterrupt: on all ranks, after an interrupt.
            SIGTERMException: on all ranks, after SIGTERM.
        """
        wanted = torch.tensor([self.requests.take_wanted()], device=self._device)
        dist.broadcast(wanted, src=0)
        number = int(wanted)
        if not number:
            return
        self.requests.pending = None
        if number == signal.SIGINT:
            self.stops_together = True
            raise KeyboardInterrupt
        if number == signal.SIGTERM:
            self.stops_together = True
            self._connector.received_sigterm = True
            raise SIGTERMException
        type(self._connector)._slurm_sigusr_handler_fn(self._connector, number, None)

    def honour_in_validation(self) -> None:
        """The same between batches of validation, which replicas need not have equally many of."""
        if self._fits and not self._splits_data:
            self.honour()

    def release(self, *, failed: bool) -> None:
        """Give back what was taken; called at the end of a run.

        Raises:
            KeyboardInterrupt: an interrupt came after the last batch.
            SIGTERMException: SIGTERM came after the last batch.
        """
        for owner, name, _ in self._replaced:
            vars(owner).pop(name, None)
        if self._wakeup_before is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self._wakeup_before, self.requests.hears_directly = None, False
            if signal.getsignal(signal.SIGINT) == self._note:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        pending, self.requests.pending = self.requests.pending, None
        if failed or pending is None:
            return
        if pending == signal.SIGINT:
            raise KeyboardInterrupt
        if pending == signal.SIGTERM:
            raise SIGTERMException

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requests.note(number)
