"""The configuration of a plan: what to paste into the YAML file of `lightning-seq1f1b fit`, or any LightningCLI."""

from __future__ import annotations

from typing import Any

from lightning_seq1f1b.schedule.balance import balanced_layers
from lightning_seq1f1b.schedule.planner.problem import Problem
from lightning_seq1f1b.schedule.planner.settings import Setting


def strategy_arguments(setting: Setting, problem: Problem) -> dict[str, Any]:
    """Arguments of `Seq1F1BStrategy` that run a setting; layers only where the strategy would share them otherwise."""
    arguments: dict[str, Any] = {
        "schedule": setting.schedule,
        "num_stages": problem.num_ranks,
        "num_microbatches": problem.num_microbatches,
        "num_chunks": setting.num_chunks,
        "partition": _partition(setting),
    }
    if setting.virtual_stages > 1:
        arguments["virtual_stages"] = setting.virtual_stages
    if setting.memory_knob is not None:
        arguments["memory_knob"] = setting.memory_knob
    if setting.layers != balanced_layers(problem.shape, problem.num_ranks, setting.virtual_stages):
        arguments["layers"] = list(setting.layers)
    return arguments


def configuration(
    setting: Setting, problem: Problem, *, devices: int, machine: str, precision: str, model: str, batch_size: int
) -> dict[str, Any]:
    """The plan as a configuration of LightningCLI with the ready module and data module.

    Args:
        setting: what to run.
        problem: what it was planned for.
        devices: of the Trainer.
        machine: name of the machine; "cpu" runs on processes of the CPU.
        precision: of the Trainer.
        model: name or path of the model.
        batch_size: rows of a batch.
    """
    return {
        "trainer": {
            "accelerator": "cpu" if machine == "cpu" else "gpu",
            "devices": devices,
            "precision": precision,
            "strategy": {
                "class_path": "lightning_seq1f1b.Seq1F1BStrategy",
                "init_args": strategy_arguments(setting, problem),
            },
        },
        "model": {"model_name_or_path": model} | ({"recompute": True} if problem.training.recompute else {}),
        "data": {"sequence_length": problem.length, "batch_size": batch_size},
    }


def as_yaml(content: dict[str, Any]) -> str:
    """YAML text in the order of the content."""
    import yaml

    return yaml.safe_dump(content, sort_keys=False)


def _partition(setting: Setting) -> str | float | list[int]:
    if isinstance(setting.partition, tuple):
        return list(setting.partition)
    names: dict[float, str] = {0.0: "even", 1.0: "balanced"}
    return names.get(setting.partition, setting.partition)
