"""A measured step goes from the strategy through a file to a picture, by the callback of the documentation."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback
from support.fitting import fit, rows, stages
from support.processes import run_processes
from support.training import FineTune

from lightning_seq1f1b.cli.main import main
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.timeline_file import load

GUIDE = Path(__file__).parents[2] / "docs" / "schedules.md"
MEASURED = {"schedule": "interleaved_seq1f1b_zb", "num_chunks": 4, "virtual_stages": 2}
KNOB = 2


def documented_callback() -> Callback:
    example = re.search(r"```python\n(.*?class SaveTimeline.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert example
    names: dict[str, type[Callback]] = {}
    exec(example.group(1), names)
    return names["SaveTimeline"]()


def trace(rank: int, directory: str) -> None:
    """For `run_processes`: train for more than the five batches after which the step is saved."""
    os.chdir(directory)
    where = stages(2, **MEASURED, memory_knob=KNOB, trace=True)
    fit(where, FineTune(num_hidden_layers=4), rows(18), callbacks=[documented_callback()], max_epochs=1)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("traced")
    run_processes(trace, 2, str(directory))
    return directory / "step.json"


def test_a_traced_step_is_the_plan_with_times(step: Path) -> None:
    recording = load(step)
    plan = make_plan("interleaved_seq1f1b_zb", 2, 3, 4, virtual_stages=2, memory_knob=KNOB)
    expected = sorted((rank, action) for rank, row in enumerate(plan.compute) for action in row)
    assert sorted((event.rank, event.action) for event in recording.events) == expected
    assert (recording.schedule, recording.memory_knob, recording.time_unit) == (plan.schedule, KNOB, "s")
    assert max(recording.peak_units) <= recording.activation_cap == plan.activation_cap
    assert all(event.start < event.end for event in recording.events)


def test_a_traced_step_is_drawn_above_its_simulation(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "draw", "--measured", str(step), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["schedule"], numbers["memory_knob"], numbers["time_unit"]) == ("interleaved_seq1f1b_zb", KNOB, "s")
    assert numbers["makespan"] > 0
    assert numbers["measured"]["warnings"] == []  # the same order as the simulation, within its cap
    assert len(numbers["timeline"]) == len(numbers["measured"]["timeline"]) == 3 * 2 * 2 * 3 * 4
    picture = step.with_suffix(".svg")
    assert main(["schedule", "draw", "--measured", str(step), f"--svg={picture}"]) == 0
    drawn = picture.read_text(encoding="utf-8")
    assert "measured: interleaved_seq1f1b_zb, p = 2, v = 2, m = 3, k = 4" in drawn
    assert "simulated: interleaved_seq1f1b_zb, p = 2, v = 2, m = 3, k = 4" in drawn
