"""A callback that writes what the demo's table needs, a file for each rank."""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L


class StepRecorder(L.Callback):
    """Writes `rank0.json`, `rank1.json`, ... when training ends: losses, step times, timed actions, peak memory.

    Args:
        directory: Where the files go.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.steps: list[dict[str, Any]] = []
        self.started = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the memory peak of loading the model, where the system can: the table is about training."""
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the step's clock."""
        self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the step: its loss, tokens, time, and what this rank computed when, where the strategy traces it."""
        step = {
            "epoch": trainer.current_epoch,
            "loss": float(outputs["loss"]),
            "tokens": batch["input_ids"].numel(),
            "seconds": time.perf_counter() - self.started,
        }
        trace = getattr(trainer.strategy, "last_step", None)
        if trace is not None:
            plan = trace.plan
            step["plan"] = [plan.schedule, plan.num_stages, plan.num_microbatches, plan.chunks]
            step["spans"] = [[(span.start, span.stop) for span in row] for row in trace.spans]
            step["events"] = [(event.rank, str(event.action), event.start, event.end) for event in trace.events]
        self.steps.append(step)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write this rank's file, after the last checkpoint."""
        self.directory.mkdir(parents=True, exist_ok=True)
        checkpoint = getattr(trainer.checkpoint_callback, "best_model_path", "")
        record = {"steps": self.steps, "peak_bytes": _peak_bytes(), "checkpoint": checkpoint}
        (self.directory / f"rank{trainer.global_rank}.json").write_text(json.dumps(record))


def _peak_bytes() -> int:
    """The process's largest resident size, since `on_train_start` on Linux, since its start elsewhere."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
