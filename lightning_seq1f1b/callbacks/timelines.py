"""A file for a measured step, written while training."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.schedule.timeline_file import Recording, to_json
from lightning_seq1f1b.strategy.seq1f1b import Seq1F1BStrategy
from lightning_seq1f1b.strategy.whole_files import whole_file


def write_timeline(path: Path, strategy: Seq1F1BStrategy, trace: StepTrace) -> None:
    """Write what all ranks of the first replica did in a step, for `lightning-seq1f1b schedule draw --measured`.

    Args:
        path: the file; whole or not there.
        strategy: that ran the step; called on all ranks.
        trace: this rank's part of the step.
    """
    events = tuple(strategy.gather_trace(trace))
    plan = trace.plan
    if strategy.global_rank > 0 or plan is None or not events:
        return
    recording = Recording(events, plan.schedule, "s", strategy.memory_knob, plan.activation_cap)
    with whole_file(path) as file:
        file.write(json.dumps(to_json(recording)).encode() + b"\n")
