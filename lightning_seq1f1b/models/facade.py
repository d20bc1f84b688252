"""`model(**batch)` on a cut model: its forward is replaced by one that runs the whole pipeline."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_seq1f1b.models.batch_checks import checked_batch
from lightning_seq1f1b.models.output import PipelineOutput
from lightning_seq1f1b.models.own_loss import check_loss_function
from lightning_seq1f1b.models.packing import ANY_PACKED, PackedRows
from lightning_seq1f1b.models.stubs import Stub
from lightning_seq1f1b.runtime.objective import EvaluationLogits, Objective
from lightning_seq1f1b.runtime.step_result import StepResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ORIGINAL = "_forward_behind_the_facade"


OBJECTIVE = "chunked_objective"
"""Argument by which `chunked_loss` hands an objective to a cut model, through whatever wraps it."""

Run = Callable[[dict[str, Tensor], Objective | None], StepResult]
"""Runs a batch through all stages; see `install`."""


def install(
    model: PreTrainedModel, run: Run, *, evaluation_logits: bool = False, packed: PackedRows = ANY_PACKED
) -> None:
    """Make `model(...)` check its arguments, call `run` and return an output with what it gives.

    Args:
        model: the model that user code calls, or that a peft model around it calls.
        run: given the batch (`input_ids`, `labels` and what else of `batch_checks.ACCEPTED` there is, by name) and what
            is asked of it, runs it through all stages.
        evaluation_logits: whether evaluation gives logits, which need no labels.
        packed: which rows packed with several documents the model can compute.
    """
    original = original_forward(model)
    signature = inspect.signature(original)
    max_length = learned_positions(model)
    checked: Any = model.loss_function

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> PipelineOutput:
        arguments: dict[str, Any] = {}
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
            further = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            arguments.update(value if further else {name: value})
        objective = arguments.pop(OBJECTIVE, None)
        nonlocal checked
        if objective is None and model.loss_function is not checked:
            check_loss_function(model)
            checked = model.loss_function
        if objective is None and evaluation_logits and not torch.is_grad_enabled():
            objective = EvaluationLogits()
        labels_needed = not isinstance(objective, EvaluationLogits)
        result = run(checked_batch(arguments, max_length, labels_needed=labels_needed, packed=packed), objective)
        return PipelineOutput(result.loss, result.logits, result.metrics)

    setattr(forward, _ORIGINAL, original)
    model.forward = forward


def is_cut(module: nn.Module) -> bool:
    """Whether calling a module runs a model behind a facade, which may be inside it."""
    return any(hasattr(getattr(part, "forward", None), _ORIGINAL) for part in module.modules())


def original_forward(model: PreTrainedModel) -> Callable[..., Any]:
    """The model's own forward, whether or not a facade is installed."""
    return getattr(model.forward, _ORIGINAL, model.forward)


def learned_positions(model: PreTrainedModel) -> int | None:
    """Tokens that a model has position embeddings for, None if it has no table of them; also once it is cut."""
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    tokens = _behind_stub(model.get_input_embeddings())
    for module in map(_behind_stub, model.modules()):
        # Some tables have a few entries more, for padding.
        if module is not tokens and isinstance(module, nn.Embedding) and limit <= module.num_embeddings <= limit + 8:
            return int(limit)
    return None


def _behind_stub(module: nn.Module) -> nn.Module:
    return module.original if isinstance(module, Stub) else module
