"""Lightning's profilers and model summaries run on stages as on one device, and the strategy tells a step's times."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelSummary, RichModelSummary
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from peft import LoraConfig, get_peft_model
from support.fitting import ONE_DEVICE, TWO_STAGES, everywhere, fit, rows, stages
from support.processes import run_processes
from support.tiny_models import tiny_model
from support.training import FineTune
from transformers import AutoModelForCausalLM

# ---- profilers -----------------------------------------------------------------------------------------------------

PROFILERS = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": functools.partial(PyTorchProfiler, record_module_names=False),
}


class Times(Callback):
    """What the strategy tells of every step, as read by a user."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        step = trainer.strategy.last_step
        self.seen.append((step.seconds, step.busy_seconds, step.bubble))


def profile(rank: int, folder: str) -> dict[str, Any]:
    """For `run_processes`: a fit under each profiler, one of them with the times of steps."""
    for name, make in PROFILERS.items():
        profiler = make(dirpath=folder, filename=name)
        fit(stages(2), FineTune(), rows(), profiler=profiler, max_epochs=1)
    times = Times()
    fit(stages(2, trace=True), FineTune(), rows(), callbacks=[times], max_epochs=1)
    return times.seen


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("profiled")
    return folder, run_processes(profile, 2, str(folder))


@pytest.mark.behaviour(27)
@pytest.mark.parametrize("name", PROFILERS)
def test_profilers_report_every_rank(profiled: tuple[Path, list[Any]], name: str) -> None:
    folder, _ = profiled
    reports = [path.read_text() for path in sorted(folder.glob(f"fit-{name}*.txt"))]
    assert len(reports) == 2
    assert all("run_training_batch" in report for report in reports)
    assert all("Seq1F1BStrategy.training_step" in report for report in reports)


@pytest.mark.behaviour(27)
def test_the_strategy_tells_bubble_and_time_of_a_step(profiled: tuple[Path, list[Any]]) -> None:
    for seen in profiled[1]:
        assert len(seen) == 3
        for seconds, busy, bubble in seen:
            assert 0 < busy < seconds < 60
            assert bubble == pytest.approx(1 - busy / seconds)


# ---- summaries -----------------------------------------------------------------------------------------------------


class Adapted(FineTune):
    """Adapters on a frozen model."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            self.model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


class Loaded(FineTune):
    """Each rank reads the tensors of its own stages; the others are on the meta device."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = AutoModelForCausalLM.from_pretrained(self.folder)


MODULES = {"plain": FineTune, "adapters": Adapted}
SUMMARIES: dict[str, type[ModelSummary]] = {"plain": ModelSummary, "rich": RichModelSummary}


def summary(kind: str, depth: int, module: str, where: Any) -> Any:
    class Kept(SUMMARIES[kind]):  # type: ignore[misc]  # a base chosen by the case
        """Keeps what it would print."""

        @staticmethod
        def summarize(*args: Any, **options: Any) -> None:
            kept.append([*args, *sorted(options.items())])

    kept: list[Any] = []
    fit(where, MODULES[module](), rows(), callbacks=[Kept(max_depth=depth)], max_steps=1)
    return kept


SHOWN = (("plain", 1, "adapters"), ("plain", -1, "adapters"), ("rich", 2, "plain"), ("rich", 3, "adapters"))
CASES = tuple(functools.partial(summary, *arguments) for arguments in SHOWN)


@pytest.mark.behaviour(38)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.args)))
def test_summaries_of_any_kind_count_the_whole_model(case: Any) -> None:
    (expected,) = everywhere(CASES, ONE_DEVICE)[case]
    first, other = everywhere(CASES, TWO_STAGES)[case]
    assert first == expected
    assert len(expected) == 1
    assert other == []


def loaded_summary(rank: int, folder: str, devices: int) -> list[Any]:
    """For `run_processes`."""
    where = ONE_DEVICE if devices == 1 else stages(devices)
    kept: list[Any] = []

    class Kept(ModelSummary):
        """Keeps what it would print."""

        @staticmethod
        def summarize(*args: Any, **options: Any) -> None:
            kept.append([*args, *sorted(options.items())])

    fit(where, Loaded(folder), rows(), callbacks=[Kept(max_depth=-1)], max_steps=1)
    return kept


@pytest.mark.behaviour(38)
def test_a_model_that_no_rank_holds_whole_is_counted_whole(tmp_path: Path) -> None:
    tiny_model("llama", torch.float32).save_pretrained(tmp_path)
    expected = loaded_summary(0, str(tmp_path), 1)
    first, other = run_processes(loaded_summary, 2, str(tmp_path), 2)
    assert first == expected
    assert other == []
