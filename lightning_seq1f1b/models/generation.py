"""`model.generate(...)` on a cut model: transformers' own loop on every rank, around a forward that runs all stages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_seq1f1b.models.facade import learned_positions, original_forward
from lightning_seq1f1b.models.generating_stage import GeneratingStage
from lightning_seq1f1b.models.generation_checks import check_arguments, setting
from lightning_seq1f1b.models.growing_cache import GenerationCache
from lightning_seq1f1b.models.requirements import cache_argument
from lightning_seq1f1b.models.stage import HuggingFaceStage
from lightning_seq1f1b.runtime.agreement import check_same_batch
from lightning_seq1f1b.runtime.decoding import Decoding
from lightning_seq1f1b.runtime.pipeline import Pipeline
from lightning_seq1f1b.runtime.random_numbers import first_rank_decides

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TAKEN = ("input_ids", "attention_mask", "position_ids")
_WITHOUT_EFFECT = ("use_cache", "return_dict", "logits_to_keep")


def install(
    model: PreTrainedModel, stages: Mapping[int, HuggingFaceStage], pipeline: Pipeline, failed: Callable[[], None]
) -> None:
    """Make `model.generate(...)` run through all stages; to be called on all pipeline ranks at the same place.

    Everything but the model's forward is transformers' `generate`: it chooses the tokens, on every rank alike, from
    logits that are the same on all. Modules are in evaluation mode meanwhile.

    Args:
        model: the cut model, which a peft model may stand around.
        stages: those of its stages that are here, by index.
        pipeline: what connects them to the others.
        failed: called when a run has failed, with ranks at different places.
    """
    if not hasattr(type(model), "generate"):
        return
    original: Callable[..., Any] = type(model).generate  # type: ignore[attr-defined]  # of GenerationMixin
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        arguments: dict[str, Any] = {}
        for name, value in signature.bind_partial(model, *args, **kwargs).arguments.items():
            further = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            arguments.update(value if further else {name: value})
        del arguments["self"]
        check_arguments(model, arguments, pipeline.device)
        control = pipeline.groups.control
        check_same_batch({f"generate's {n}": t for n, t in arguments.items() if isinstance(t, Tensor)}, control)
        text = _Text(model, stages, pipeline, failed, together=setting(model, arguments, "num_beams") or 1)
        if setting(model, arguments, "use_cache") is not False:
            kwargs[text.cache_name] = text.cache
        try:
            with _evaluating(model), text.instead_of_forward():
                with first_rank_decides(pipeline.topology, control, pipeline.device):
                    result = original(model, *args, **kwargs)
                text.decoding.agree(None)
        finally:
            text.cache.close()
        return result

    model.generate = generate  # type: ignore[assignment]


class _Text:
    """One call of generate."""

    def __init__(
        self,
        model: PreTrainedModel,
        stages: Mapping[int, HuggingFaceStage],
        pipeline: Pipeline,
        failed: Callable[[], None],
        together: int,
    ) -> None:
        self.model, self.failed = model, failed
        self.cache_name = cache_argument(model) or "cache"
        self.max_length = learned_positions(model)
        self.cache = GenerationCache(model.config, together, pipeline.topology.num_stages)
        self.decoding = Decoding(
            pipeline, {index: GeneratingStage(stage, self.cache) for index, stage in stages.items()}
        )

    @contextmanager
    def instead_of_forward(self) -> Iterator[None]:
        """Inside, calling the model runs `forward`."""
        before = self.model.forward

        @functools.wraps(original_forward(self.model))
        def forward(**arguments: Any) -> CausalLMOutputWithPast:
            return self.forward(arguments)

        self.model.forward = forward
        try:
            yield
        finally:
            self.model.forward = before

    def forward(self, arguments: dict[str, Any]) -> CausalLMOutputWithPast:
        """The logits of the last token, from new tokens, or without a cache from all tokens."""
        cache = arguments.pop(self.cache_name, None)
        for name, value in arguments.items():
            if name not in _TAKEN and name not in _WITHOUT_EFFECT and value is not None and value is not False:
                raise ValueError(f"generate of a model that is cut into pipeline stages does not take {name!r}")
        if cache is not None and cache is not self.cache:
            raise ValueError("generate of a model that is cut into pipeline stages makes its cache itself")
        inputs = {name: arguments[name] for name in _TAKEN if arguments.get(name) is not None}
        rows, tokens = inputs["input_ids"].shape
        if cache is None:
            self.cache.close()
        length = self.cache.length + tokens
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"text of {length} tokens, but the model has positions for {self.max_length} "
                "(config.max_position_embeddings); set max_new_tokens lower, or cut the prompt"
            )
        if self.cache.length == 0:
            self.cache.open(rows)
        self.decoding.agree(inputs)
        try:
            logits = self.decoding.run(inputs, self.cache.length, self.cache.row_ranges)
        except BaseException:
            self.failed()
            raise
        self.cache.length = length
        held: dict[str, Any] = {self.cache_name: cache}
        return CausalLMOutputWithPast(logits=logits, **held)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
