"""What a process is at outside a pipelined step, in words, read off the frames of its call stack.

Nothing is noted while a run goes well: frames tell after a failure, or when a process does not get on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

_HOOKS = (
    "_call_callback_hooks",
    "_call_lightning_module_hook",
    "_call_lightning_datamodule_hook",
    "_call_strategy_hook",
)
_LOADING = (
    "torch/utils/data/",
    "lightning/pytorch/loops/fetchers.py",
    "lightning/pytorch/utilities/combined_loader.py",
)
_WAITING = "torch/distributed/"
_FUNCTIONS = {
    ("lightning/pytorch/trainer/trainer.py", "save_checkpoint"): "saving a checkpoint",
    ("checkpoint_connector.py", "restore_training_state"): "loading a checkpoint",
    ("checkpoint_connector.py", "_restore_modules_and_callbacks"): "loading a checkpoint",
    ("lightning/pytorch/strategies/strategy.py", "optimizer_step"): "in the optimizer step",
    ("lightning_seq1f1b/strategy/processes.py", "setup_environment"): "connecting the processes",
    ("lightning_seq1f1b/strategy/seq1f1b.py", "setup"): "preparing the stages",
}
DATA_LOADER = "in the data loader"
BETWEEN_STEPS = "between steps"


def of_failure(exception: BaseException) -> str:
    """Where an exception was raised: "in the data loader", "in Printer.on_train_batch_end", else "between steps"."""
    return _words(_frames_of(exception.__traceback__))


def of_thread(thread: int) -> tuple[str, bool]:
    """What a running thread is at, and whether it waits for other processes in a call of torch.distributed.

    Args:
        thread: its identity, as `threading.get_ident` gives it.
    """
    frame = sys._current_frames().get(thread)
    frames = list(_callers(frame))
    return _words(reversed(frames)), any(_WAITING in _path(frame) for frame in frames[:8])


def _frames_of(trace: TracebackType | None) -> Iterator[FrameType]:
    """From the outermost to the one that raised."""
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    """From the innermost outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _words(frames: Iterator[FrameType]) -> str:
    found = BETWEEN_STEPS
    for frame in frames:  # the innermost that says something says most
        found = _words_of(frame) or found
    return found


def _words_of(frame: FrameType) -> str:
    path, name = _path(frame), frame.f_code.co_name
    if any(part in path for part in _LOADING):
        return DATA_LOADER
    if name in _HOOKS and path.endswith("/trainer/call.py"):
        hook, callback = frame.f_locals.get("hook_name"), frame.f_locals.get("callback")
        owner = f"{type(callback).__name__}." if callback is not None else ""
        return f"in {owner}{hook}"
    return next(
        (words for (file, function), words in _FUNCTIONS.items() if name == function and path.endswith(file)), ""
    )


def _path(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")
