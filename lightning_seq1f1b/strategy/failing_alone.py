"""What happens on a rank that fails by itself, while the others go on: all that would wait for them is left out.

Callbacks are told of an exception before the strategy is, and some save a checkpoint then, which needs all ranks. So
the strategy has a callback of its own, the first of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from typing_extensions import override

from lightning_seq1f1b.strategy.forced_end import say
from lightning_seq1f1b.strategy.supported import callbacks_of

if TYPE_CHECKING:
    from lightning_seq1f1b.strategy.processes import PipelineProcesses


class FirstToKnow(Callback):
    """Tells the strategy of an exception before any other callback hears of it; in the Trainer's list during a run."""

    def __init__(self, strategy: PipelineProcesses) -> None:
        self._strategy = strategy

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Report it, and let the callbacks after this one do without other ranks."""
        self._strategy.begin_exception(exception)


class WithoutSaving:
    """Keeps a Trainer's callbacks from saving, until it is undone.

    Args:
        trainer: whose callbacks are about to be told of an exception.
        rank: this process.
    """

    def __init__(self, trainer: pl.Trainer, rank: int) -> None:
        self._trainer = trainer
        self._rank, self._warned = rank, False
        self._switched_off = [
            callback
            for callback in callbacks_of(trainer)
            if isinstance(callback, ModelCheckpoint) and callback.save_on_exception
        ]
        for callback in self._switched_off:
            callback.save_on_exception = False  # it would go on as if it had saved
        if self._switched_off:
            self._warn()
        vars(self._trainer)["save_checkpoint"] = self._refuse

    def undo(self) -> None:
        """Let them save again."""
        for callback in self._switched_off:
            callback.save_on_exception = True
        vars(self._trainer).pop("save_checkpoint", None)

    def _refuse(self, *_: Any, **__: Any) -> None:
        self._warn()

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            say(
                f"rank {self._rank} saves no checkpoint on this exception: a checkpoint holds parts of all ranks, and "
                "the others are still at work. The last one that was saved is whole"
            )


def first_to_know(trainer: pl.Trainer, strategy: PipelineProcesses) -> Callable[[], None]:
    """Put the callback first; returns what takes it out again."""
    callbacks, callback = callbacks_of(trainer), FirstToKnow(strategy)
    callbacks.insert(0, callback)
    return lambda: callbacks.remove(callback)
