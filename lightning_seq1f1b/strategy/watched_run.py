"""One run of a Trainer on several processes: who hears of its signals and of its end, and in which order."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import lightning.pytorch as pl

from lightning_seq1f1b.strategy.failing_alone import WithoutSaving, first_to_know
from lightning_seq1f1b.strategy.failure import FailureBoard
from lightning_seq1f1b.strategy.memory_advice import advise
from lightning_seq1f1b.strategy.signals import BatchSignals
from lightning_seq1f1b.strategy.whereabouts import of_failure

if TYPE_CHECKING:
    from lightning_seq1f1b.strategy.processes import PipelineProcesses


class WatchedRun:
    """From the connecting of the processes to the strategy's teardown.

    Args:
        strategy: of the Trainer.
        trainer: whose run this is.
        board: of the processes; None for a single one.
        patience_s: how long a rank waits for another one.
    """

    def __init__(
        self, strategy: PipelineProcesses, trainer: pl.Trainer, board: FailureBoard | None, patience_s: float
    ) -> None:
        self._strategy, self._trainer, self._board = strategy, trainer, board
        self._told: BaseException | None = None
        self._without_saving: WithoutSaving | None = None
        self.signals: BatchSignals | None = None
        self._take_out: Callable[[], None] | None = None
        strategy.position.leave()
        if board is not None:
            topology = strategy.topology
            self.signals = BatchSignals(
                trainer, strategy.root_device, decides=topology.rank == 0, splits_data=topology.num_replicas > 1
            )
            self._take_out = first_to_know(trainer, strategy)
            board.open(strategy.position, patience_s, self._children, self.signals.requests)

    @property
    def is_alone(self) -> bool:
        """Whether callbacks of this rank are being told of an exception that other ranks do not have."""
        return self._without_saving is not None

    @property
    def stops_together(self) -> bool:
        """Whether all ranks end the run at the same place."""
        return self.signals is not None and self.signals.stops_together

    def training_starts(self) -> None:
        """From now on there are batches between which a run can end."""
        if self.signals is not None and self._board is not None:
            self.signals.take_interrupts(self._board.wake_handle)

    def training_ends(self) -> None:
        """There are no more batches."""
        if self.signals is not None:
            self.signals.honour()

    def begin_exception(self, exception: BaseException) -> None:
        """Tell the other ranks; called before the Trainer's callbacks are told."""
        if self.stops_together or self._told is exception:
            return
        self._told = exception
        strategy = self._strategy
        topology, position = strategy.topology, strategy.position
        stage = topology.pipeline_rank if position.stage is None else position.stage
        advise(exception, stage, strategy.root_device)
        if self._board is not None:
            where = f"stage {stage} of replica {topology.replica}, {str(position) or of_failure(exception)}"
            self._board.report(exception, where)
            self._without_saving = WithoutSaving(self._trainer, topology.rank)

    def end_exception(self, exception: BaseException) -> None:
        """The callbacks have been told."""
        self.begin_exception(exception)
        if self._without_saving is not None:
            self._without_saving.undo()
            self._without_saving = None

    def end(self, *, failed: bool) -> None:
        """Give back what was taken from the Trainer; signals that came too late are raised here."""
        if self._board is not None:
            self._board.close()
        if self._take_out is not None:
            self._take_out()
            self._take_out = None
        if self.signals is not None:
            self.signals.release(failed=failed)

    def _children(self) -> Iterable[subprocess.Popen[bytes]]:
        """The ranks that this one has started."""
        return tuple(getattr(self._strategy.launcher, "procs", ()))
