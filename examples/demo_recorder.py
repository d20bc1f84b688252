"""A callback that writes what the demo's table needs: losses, step times, traces and peak memory, a file for each rank."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L


class StepRecorder(L.Callback):
    """Writes `rank0.json`, `rank1.json`, ... into a directory when training ends.

    Args:
        directory: where the files go.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.traces: list[list[tuple[str, float, float]]] = []
        self.started = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the memory peak of loading the model: the table is about training."""
        _reset_peak_memory()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the step's clock."""
        self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the step's loss, time, and this rank's compute actions where the strategy traces them."""
        self.losses.append(float(outputs["loss"]))
        self.seconds.append(time.perf_counter() - self.started)
        step = getattr(trainer.strategy, "last_step", None)
        if step is not None:
            self.traces.append([(str(event.action), event.start, event.end) for event in step.events])
            self.spans = [(span.start, span.stop) for span in step.spans]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write this rank's file."""
        self.directory.mkdir(parents=True, exist_ok=True)
        record = {
            "losses": self.losses,
            "seconds": self.seconds,
            "traces": self.traces,
            "spans": getattr(self, "spans", []),
            "peak_bytes": peak_memory(),
        }
        (self.directory / f"rank{trainer.global_rank}.json").write_text(json.dumps(record))


def _reset_peak_memory() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def peak_memory() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
