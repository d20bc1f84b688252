"""`model(**batch)` on a cut model: its forward is replaced by one that runs the whole pipeline."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_seq1f1b.models.batch_checks import checked_batch
from lightning_seq1f1b.models.output import PipelineOutput
from lightning_seq1f1b.models.stubs import Stub

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ORIGINAL = "_forward_behind_the_facade"


def install(model: PreTrainedModel, run: Callable[[dict[str, Tensor]], Tensor]) -> None:
    """Make `model(...)` check its arguments, call `run` and return an output with the loss it gives.

    Args:
        model: the model that user code calls, or that a peft model around it calls.
        run: given the batch (`input_ids`, `labels` and what else of `batch_checks.ACCEPTED` there is, by name), runs it
            through all stages and returns its loss, a scalar.
    """
    original = original_forward(model)
    signature = inspect.signature(original)
    max_length = learned_positions(model)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> PipelineOutput:
        arguments: dict[str, Any] = {}
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
            further = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            arguments.update(value if further else {name: value})
        return PipelineOutput(run(checked_batch(arguments, max_length)))

    setattr(forward, _ORIGINAL, original)
    model.forward = forward


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
