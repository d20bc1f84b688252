"""The monitor in real runs: what reaches loggers and bar, equal on all ranks, and the files of timelines."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from support.fitting import TWO_BY_TWO, Where, fit, rows, stages
from support.processes import run_processes
from support.training import QUIET, FineTune, Recorder, Rows
from torch.utils.data import DataLoader

from lightning_seq1f1b import PipelineMonitor, Seq1F1BStrategy
from lightning_seq1f1b.cli import training
from lightning_seq1f1b.runtime.step_load import Load
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.timeline_file import load

LENGTH, BATCH = 29, 3
IN_TURN = {"schedule": "interleaved_seq1f1b_zb", "virtual_stages": 2, "memory_knob": 2}


class Bar(ProgressBar):
    """Keeps what it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def disable(self) -> None:
        pass

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.shown.append(self.get_metrics(trainer, pl_module))


def padded(count: int) -> DataLoader:
    return DataLoader(Rows(count, padded=True, seed=1, length=LENGTH), batch_size=BATCH)


def watched(
    where: Where,
    loader: DataLoader,
    folder: str | None,
    monitor: PipelineMonitor,
    val: DataLoader | None = None,
    **options: Any,
) -> dict:
    """One epoch with a monitor; what this rank has seen of it."""
    bar, recorder = Bar(), Recorder()
    loggers = [] if folder is None else [CSVLogger(folder, "csv"), TensorBoardLogger(folder, "tensorboard")]
    options = {"max_epochs": 1, "logger": loggers, "enable_progress_bar": True, **options}
    module = FineTune(num_hidden_layers=4)
    trainer = fit(where, module, loader, val, callbacks=[recorder, monitor, bar], **options)
    strategy = trainer.strategy
    return {
        "losses": recorder.losses,
        "bar": bar.shown,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "left": (strategy.step_watchers, sorted({"start", "stop"} & vars(trainer.profiler).keys())),
    }


def plain(where: Where, folder: str) -> dict:
    return watched(where, rows(13, BATCH), f"{folder}/plain", PipelineMonitor(), log_every_n_steps=2)


def accumulated(where: Where, folder: str) -> dict:
    where = stages(where.devices, **IN_TURN)
    monitor = PipelineMonitor(timeline_every_n_steps=2, peak_tflops=1e-3)
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 1, "val_check_interval": 2}
    options["limit_val_batches"] = 1
    return watched(where, padded(19), f"{folder}/accumulated", monitor, rows(2, 2), **options)


def without_logger(where: Where, folder: str) -> dict:
    monitor = PipelineMonitor(every_n_steps=3, timeline_every_n_steps=1)
    options = {"default_root_dir": f"{folder}/root", "num_sanity_val_steps": 1}
    seen = watched(where, rows(9, BATCH), None, monitor, rows(2, 2), **options)
    unseen = fit(where, FineTune(num_hidden_layers=4), rows(9, BATCH), callbacks=[recorder := Recorder()], max_epochs=1)
    assert unseen.strategy.last_step is None
    return {**seen, "losses without": recorder.losses}


def validated_only(where: Where, folder: str) -> dict:
    """A validation without a training, by a Trainer that has a monitor."""
    strategy = Seq1F1BStrategy(**dict(where.strategy))
    trainer = L.Trainer(**QUIET, devices=where.devices, strategy=strategy, callbacks=[PipelineMonitor()])
    (metrics,) = trainer.validate(FineTune(num_hidden_layers=4), rows(2, 2), verbose=False)
    return {"metrics": metrics, "left": (strategy.step_watchers, [])}


TRAININGS: tuple[Callable[[Where, str], dict], ...] = (plain, accumulated, without_logger)
CASES = (*TRAININGS, validated_only)


def run_all(rank: int, folder: str) -> list[dict]:
    """For `run_processes`."""
    return [case(stages(2), folder) for case in CASES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("monitored")


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[Callable, tuple[dict, dict]]:
    first, second = run_processes(run_all, 2, str(folder))
    return {case: results for case, *results in zip(CASES, first, second, strict=True)}


def logged(folder: Path) -> list[dict[str, str]]:
    """The rows of the CSV file that have a report."""
    with open(folder / "csv" / "version_0" / "metrics.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("pipeline/step_seconds")]


NAMES = {
    "pipeline/bubble",
    "pipeline/bubble/rank_0",
    "pipeline/bubble/rank_1",
    "pipeline/step_seconds",
    "pipeline/data_seconds",
    "pipeline/tokens_per_second",
    "pipeline/supervised_tokens_per_second",
    "pipeline/peak_memory_gib/rank_0",
    "pipeline/peak_memory_gib/rank_1",
}


@pytest.mark.behaviour(19)
@pytest.mark.parametrize("case", TRAININGS)
def test_metrics_are_equal_on_all_ranks(ran: dict, case: Callable) -> None:
    first, second = ran[case]
    assert set(first["metrics"]) >= {*NAMES, "tokens/s"}
    assert first["metrics"] == second["metrics"]


def test_a_validation_alone_is_left_as_it_is(ran: dict) -> None:
    for seen in ran[validated_only]:
        assert seen["metrics"].keys() == {"val_loss"}
        assert seen["left"] == ([], [])


def test_they_are_possible(ran: dict) -> None:
    metrics = ran[plain][0]["metrics"]
    assert 0 < metrics["pipeline/data_seconds"] < metrics["pipeline/step_seconds"] < 60
    bubbles = [metrics[f"pipeline/bubble/rank_{rank}"] for rank in range(2)]
    assert all(0 < bubble < 1 for bubble in bubbles)
    assert metrics["pipeline/bubble"] == pytest.approx(sum(bubbles) / 2)
    assert all(0.01 < metrics[f"pipeline/peak_memory_gib/rank_{rank}"] < 100 for rank in range(2))
    assert "pipeline/mfu" not in metrics  # nobody has said what this machine could reach


def test_loggers_get_them_every_so_many_steps(ran: dict, folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = logged(folder / "plain")
    assert [int(row["step"]) for row in log] == [1, 3]  # five steps, of which every second is logged
    assert log[0].keys() >= NAMES
    events = EventAccumulator(str(folder / "plain" / "tensorboard" / "version_0"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= NAMES
    shown = events.Scalars("pipeline/bubble")
    assert [event.value for event in shown] == pytest.approx([float(row["pipeline/bubble"]) for row in log])


def test_tokens_of_whole_rows_are_counted(ran: dict, folder: Path) -> None:
    for row in logged(folder / "plain"):
        tokens = float(row["pipeline/tokens_per_second"]) * float(row["pipeline/step_seconds"])
        assert tokens == pytest.approx(BATCH * LENGTH, rel=1e-5)


def test_padding_counts_in_no_step_with_accumulated_gradients(ran: dict, folder: Path) -> None:
    batches = list(padded(19))
    log = logged(folder / "accumulated")
    assert len(log) == len(batches) // 2 + 1 == 4  # the last one steps on one batch alone
    for index, row in enumerate(log):
        window = batches[2 * index : 2 * index + 2]
        real = sum(int(batch["attention_mask"].sum()) for batch in window)
        supervised = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
        seconds = float(row["pipeline/step_seconds"])
        assert float(row["pipeline/tokens_per_second"]) * seconds == pytest.approx(real, rel=1e-5)
        assert float(row["pipeline/supervised_tokens_per_second"]) * seconds == pytest.approx(supervised, rel=1e-5)
        assert 0 < float(row["pipeline/mfu"]) < 1000


@pytest.mark.behaviour(18)
def test_the_bar_shows_loss_and_speed(ran: dict) -> None:
    first, second = ran[plain]
    assert ["tokens/s" in shown for shown in first["bar"]] == [False, True, True, True, True]
    assert all("train_loss_step" in shown for shown in first["bar"])
    assert first["bar"][-1]["tokens/s"] == pytest.approx(first["metrics"]["pipeline/tokens_per_second"])
    assert second["bar"][-1].get("tokens/s") == first["bar"][-1]["tokens/s"]


def test_training_is_the_same_and_nothing_is_left(ran: dict) -> None:
    for rank in ran[without_logger]:
        assert rank["losses"] == rank["losses without"]
    assert all(rank["left"] == ([], []) for ranks in ran.values() for rank in ranks)


def test_timelines_lie_beside_the_log_and_are_kept(ran: dict, folder: Path) -> None:
    files = sorted((folder / "accumulated" / "csv" / "version_0" / "timelines").iterdir())
    assert [file.name for file in files] == ["step-00000002.json", "step-00000004.json"]
    recording = load(files[1])  # of one row alone
    plan = make_plan("interleaved_seq1f1b_zb", 2, 1, 3, virtual_stages=2, memory_knob=2)
    expected = sorted((rank, action) for rank, row in enumerate(plan.compute) for action in row)
    assert sorted((event.rank, event.action) for event in recording.events) == expected
    assert (recording.schedule, recording.memory_knob, recording.time_unit) == (plan.schedule, 2, "s")


def test_timelines_without_a_logger_lie_in_the_root_directory(ran: dict, folder: Path) -> None:
    files = sorted((folder / "root" / "timelines").iterdir())
    assert [file.name for file in files] == [f"step-0000000{step}.json" for step in (1, 2, 3)]
    assert all(load(file).num_ranks == 2 for file in files)


def one_stage(rank: int) -> dict[str, float]:
    """For `run_processes`."""
    return watched(stages(1), rows(9, BATCH), None, PipelineMonitor(every_n_steps=1))["metrics"]


def test_one_stage() -> None:
    (metrics,) = run_processes(one_stage, 1)
    assert metrics["pipeline/bubble"] == metrics["pipeline/bubble/rank_0"] < 0.9
    tokens = metrics["pipeline/tokens_per_second"] * metrics["pipeline/step_seconds"]
    assert tokens == pytest.approx(BATCH * LENGTH, rel=1e-5)


def two_replicas(rank: int) -> dict[str, float]:
    """For `run_processes`: six rows for each replica, in batches of three."""
    return watched(TWO_BY_TWO, rows(12, BATCH), None, PipelineMonitor(every_n_steps=2))["metrics"]


def test_replicas_add_up() -> None:
    first, *others = run_processes(two_replicas, 4)
    names = [name for name in first if name.startswith("pipeline/")]
    assert set(names) == NAMES  # of two pipeline ranks
    assert all({name: other[name] for name in names} == {name: first[name] for name in names} for other in others)
    tokens = first["pipeline/tokens_per_second"] * first["pipeline/step_seconds"]
    assert tokens == pytest.approx(2 * BATCH * LENGTH, rel=1e-5)


def test_packed_rows_have_no_padding_to_count() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    batch = {"input_ids": torch.ones_like(positions), "position_ids": positions}
    from lightning_seq1f1b.schedule.costs import ModelShape

    shape = ModelShape(1, 8, 1, 1, 8, 16, True, 10)
    counted = Load.of({**batch, "labels": positions.masked_fill(positions == 0, -100)}, [], shape)
    assert (int(counted.tokens), int(counted.supervised)) == (5 + 7, 3 + 6)
    assert int(Load.of(batch, [], shape).supervised) == 0


# ---- what is refused, and how it is named --------------------------------------------------------------------------


def set_up(monitor: PipelineMonitor, **options: Any) -> None:
    monitor.setup(L.Trainer(logger=options.pop("logger", False), **options), FineTune(), "fit")


def test_another_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"watches the stages of Seq1F1BStrategy, but the Trainer has SingleDevice"):
        set_up(PipelineMonitor())


def test_steps_that_reach_no_logger_are_refused(tmp_path: Path) -> None:
    options = {"strategy": "seq1f1b", "accelerator": "cpu", "devices": 1, "log_every_n_steps": 2}
    with pytest.raises(ValueError, match=r"every_n_steps=3\) is no multiple of the Trainer's log_every_n_steps=2"):
        set_up(PipelineMonitor(every_n_steps=3), logger=CSVLogger(tmp_path), **options)
    set_up(PipelineMonitor(every_n_steps=4), logger=CSVLogger(tmp_path), **options)
    set_up(PipelineMonitor(every_n_steps=3), **options)


@pytest.mark.parametrize("name", ["every_n_steps", "timeline_every_n_steps", "peak_tflops"])
def test_numbers_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive, or left out, not 0"):
        PipelineMonitor(**{name: 0})


@pytest.mark.behaviour(41)
@pytest.mark.parametrize("name", ["lightning_seq1f1b.PipelineMonitor", "PipelineMonitor"])
def test_a_config_file_can_name_it(name: str) -> None:
    assert training.TrainingCLI  # the commands know the short name
    callbacks = [{"class_path": name, "init_args": {"timeline_every_n_steps": 100}}]
    cli = LightningCLI(
        FineTune,
        args={
            "model": {},
            "trainer": {
                **QUIET,
                "callbacks": callbacks,
                "strategy": {"class_path": "lightning_seq1f1b.Seq1F1BStrategy"},
            },
        },
        run=False,
        save_config_callback=None,
    )
    (callback,) = [each for each in cli.trainer.callbacks if isinstance(each, PipelineMonitor)]
    assert (callback.every_n_steps, callback.timeline_every_n_steps) == (None, 100)
    assert isinstance(cli.trainer.strategy, Seq1F1BStrategy)
