"""Turns the strategy's arguments into the cut of the model, and into how batches are cut and run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer

from lightning_seq1f1b.models.find import find_causal_lm
from lightning_seq1f1b.models.shape import model_shape
from lightning_seq1f1b.runtime.pipeline import Cutting
from lightning_seq1f1b.schedule.planner import Problem
from lightning_seq1f1b.strategy.automatic import AUTO, AutomaticCutting, best_setting, knobs_of, problem_for
from lightning_seq1f1b.strategy.cut_module import CutModule, LoadedPart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightning_seq1f1b.strategy.seq1f1b import Seq1F1BStrategy

GPU_CHUNK_MULTIPLE = 128
"""Tokens that chunk lengths are rounded to on an accelerator: whole tiles of its attention kernels."""

CPU_CHUNK_MULTIPLE = 16


def multiple_on(device: torch.device) -> int:
    """Tokens that chunk lengths are rounded to on a device."""
    return CPU_CHUNK_MULTIPLE if device.type == "cpu" else GPU_CHUNK_MULTIPLE


def cut_as_asked(strategy: Seq1F1BStrategy, trainer: Trainer) -> tuple[CutModule, Problem | None]:
    """The cut of the strategy's module, and the planner's problem where it decides; None where the user did.

    Raises:
        ValueError: as for `CutModule`; for arguments that leave the planner nothing; for an unusable profile.
    """
    module = strategy.lightning_module
    assert module is not None
    _, model = find_causal_lm(module)
    settled = CutModule.earlier(module) or LoadedPart.of(model)
    virtual_stages, layers, problem = stages_as_asked(strategy, trainer, model, settled)
    return CutModule.of(module, strategy.topology, virtual_stages, layers), problem


def stages_as_asked(
    strategy: Seq1F1BStrategy, trainer: Trainer, model: PreTrainedModel, settled: CutModule | LoadedPart | None = None
) -> tuple[int, list[int] | None, Problem | None]:
    """Virtual stages, layers of every stage (None to balance them), and the planner's problem where it decides.

    Called on all ranks together.

    Args:
        strategy: its arguments are asked for.
        trainer: its data module is planned for.
        model: the language model, not yet cut, values not needed.
        settled: the stages that the model has got already, which the planner keeps.
    """
    virtual_stages, layers = strategy.virtual_stages, strategy.layers
    if strategy.schedule != AUTO:
        return 1 if virtual_stages == AUTO else int(virtual_stages), layers, None
    if settled is not None:  # there are no other stages any more to choose
        virtual_stages, layers = settled.virtual_stages, list(settled.layers)
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]  # the class does not declare it
    device = strategy.root_device
    problem = problem_for(
        model,
        model_shape(model.config),
        num_ranks=strategy.topology.num_stages,
        device=device,
        precision=str(strategy.precision_plugin.precision),
        multiple=multiple_on(device),
        data=datamodule,
        profile=strategy.profile,
        knobs=knobs_of(virtual_stages, strategy.num_chunks, strategy.memory_knob, strategy.partition, layers),
    )
    # Devices may differ; all ranks must plan for the same ones.
    problem = strategy.broadcast(problem)
    setting = best_setting(problem)
    return setting.virtual_stages, list(setting.layers), problem


def cutting_of(strategy: Seq1F1BStrategy, cut: CutModule, problem: Problem | None, multiple: int) -> Cutting:
    """How batches are cut.

    Args:
        strategy: its arguments are asked for.
        cut: the cut of its module.
        problem: from `cut_as_asked`.
        multiple: tokens that chunk lengths are rounded to.
    """
    num_microbatches = None if strategy.num_microbatches == AUTO else int(strategy.num_microbatches)
    if problem is not None:
        return AutomaticCutting.of(problem, cut.virtual_stages, cut.layers, num_microbatches)
    return Cutting(
        schedule=strategy.schedule,
        num_microbatches=num_microbatches,
        num_chunks=None if strategy.num_chunks == AUTO else int(strategy.num_chunks),
        partition=strategy.partition,
        multiple=multiple,
        virtual_stages=cut.virtual_stages,
        memory_knob=strategy.memory_knob,
        activation_cap=strategy.activation_cap,
    )
