"""Inside `configure_model`, `from_pretrained` reads only what this rank's stages need."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_seq1f1b.models.find import find_causal_lm
from lightning_seq1f1b.models.partial_loading import (
    AdaptersFoundError,
    Load,
    Mismatch,
    build_empty,
    fill,
    load_without,
)
from lightning_seq1f1b.models.shape import model_shape
from lightning_seq1f1b.models.split import cut
from lightning_seq1f1b.models.stubs import Stub
from lightning_seq1f1b.runtime.together import failing_together
from lightning_seq1f1b.strategy.as_asked import stages_as_asked
from lightning_seq1f1b.strategy.cut_module import LoadedPart, layer_ranges, stages_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightning_seq1f1b.strategy.seq1f1b import Seq1F1BStrategy

WHOLE_WITH = (
    "device_map",
    "device_mesh",
    "distributed_config",
    "gguf_file",
    "ignore_mismatched_sizes",
    "quantization_config",
    "state_dict",
    "tp_plan",
    "tp_size",
)
"""Arguments of `from_pretrained` with which a model is loaded whole: they are about values that not all ranks have."""

_ELSEWHERE = (
    "What needs the whole model's values, such as resizing its embeddings, do once: save the model and load the "
    "result. Or load the model in the module's __init__, where every rank has all values"
)

_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys")
"""What `output_loading_info` tells beside error messages; nothing of it is left once a model has been loaded."""


@dataclass(frozen=True)
class _Read:
    """A model that has been read in part, and how."""

    model: PreTrainedModel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextmanager
def reading_own_part(strategy: Seq1F1BStrategy) -> Iterator[None]:
    """Inside, `from_pretrained` of a causal language model gives the whole model, of which other stages are on meta.

    On all ranks of a replica together. Models that turn out not to be the module's one language model, such as a
    teacher, are read whole at the end.

    Raises:
        ValueError: on all ranks alike, for tensors that are missing, surplus or of a wrong shape in the checkpoint, all
            listed; and when what is done inside has drawn random numbers that depend on the rank.
    """
    from transformers import PreTrainedModel

    method = PreTrainedModel.__dict__["from_pretrained"]
    load: Load = method.__func__
    reads: list[_Read] = []

    @functools.wraps(load)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        model = _load_part(strategy, cls, load, *args, **kwargs) if _is_readable_in_part(cls, kwargs) else None
        if model is None:
            return load(cls, *args, **kwargs)
        told = bool(kwargs.pop("output_loading_info", False))
        reads.append(_Read(model, args, kwargs))
        return (model, {**{key: set() for key in _INFO}, "error_msgs": []}) if told else model

    before = _random_state()
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]
    try:
        yield
    except RuntimeError as error:
        if not reads or "meta tensor" not in str(error):  # what torch says of an operation that needs values
            raise
        raise ValueError(
            f"configure_model used weights of other stages, which have no values on this rank ({error}). {_ELSEWHERE}"
        ) from error
    finally:
        PreTrainedModel.from_pretrained = method  # type: ignore[method-assign]
    if reads:
        _complete_others(strategy.lightning_module, reads, load)
        _check_random_state(before, _random_state(), strategy._process_groups.control)


def _is_readable_in_part(cls: type[PreTrainedModel], kwargs: dict[str, Any]) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(base.__name__ in causal for base in cls.__mro__) and not any(kwargs.get(name) for name in WHOLE_WITH)


def _load_part(
    strategy: Seq1F1BStrategy, cls: type[PreTrainedModel], load: Load, *args: Any, **kwargs: Any
) -> PreTrainedModel | None:
    """The model with this rank's values; None for one that must be loaded whole."""
    control = strategy._process_groups.control
    what = f"loading {cls.__name__}"
    with failing_together(control, what):
        empty = build_empty(cls, load, *args, **kwargs)
    if getattr(empty.config, "quantization_config", None) is not None:
        return None
    module = strategy.lightning_module
    assert module is not None
    virtual_stages, layers, _ = stages_as_asked(strategy, module.trainer, empty)
    topology = strategy.topology
    try:
        ranges = layer_ranges(model_shape(empty.config), topology.num_stages, virtual_stages, layers)
        cut(empty, stages_of(topology, virtual_stages), ranges)
    except ValueError:
        return None  # setup says why, if this is the model to cut
    hidden = [name for name, child in empty.named_modules() if isinstance(child, Stub)]
    found: tuple[PreTrainedModel, Mismatch] | None = None
    with failing_together(control, what), suppress(AdaptersFoundError):
        found = load_without(cls, hidden, load, *args, **kwargs)
    if found is None:
        return None
    model, mismatch = found
    _check_fit(cls, args[0] if args else kwargs.get("pretrained_model_name_or_path"), mismatch, control)
    if hidden:
        LoadedPart(topology, virtual_stages, tuple(map(len, ranges))).mark(model)
    return model


def _check_fit(cls: type[PreTrainedModel], path: object, mismatch: Mismatch, control: dist.ProcessGroup) -> None:
    everyone: list[Mismatch] = [mismatch] * dist.get_world_size(control)
    dist.all_gather_object(everyone, mismatch, group=control)
    # What one stage has no place for belongs to another one, unless all say so.
    surplus = frozenset.intersection(*(each.surplus for each in everyone))
    lines = [
        *(f"missing tensor: {name}" for name in sorted({name for each in everyone for name in each.missing})),
        *(f"unexpected tensor: {name}" for name in sorted(surplus)),
        *(f"wrong shape: {line}" for line in sorted({line for each in everyone for line in each.shapes})),
        *(f"not tied: {line}" for line in sorted({line for each in everyone for line in each.untied})),
    ]
    if lines:
        raise ValueError(
            f"the checkpoint {path} does not fit {cls.__name__}:\n  " + "\n  ".join(lines) + "\n"
            "Mend the checkpoint or its config. To leave tensors out, or to begin with random ones, on purpose, load "
            "the model in the module's __init__: there it is loaded whole, by the rules of transformers"
        )


def _complete_others(module: nn.Module | None, reads: Sequence[_Read], load: Load) -> None:
    """Read the rest of the models that will not be cut."""
    assert module is not None
    try:
        _, found = find_causal_lm(module)
    except ValueError:
        return  # setup will say so
    for read in reads:
        if read.model is not found and (part := LoadedPart.of(read.model)) is not None:
            fill(read.model, load(type(read.model), *read.args, **read.kwargs))
            part.unmark(read.model)


def _random_state() -> str:
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()


def _check_random_state(before: str, after: str, control: dist.ProcessGroup) -> None:
    states = [(before, after)] * dist.get_world_size(control)
    dist.all_gather_object(states, (before, after), group=control)
    starts, ends = map(set, zip(*states, strict=True))
    if len(starts) == 1 and len(ends) > 1:
        raise ValueError(
            "configure_model drew different random numbers on different ranks, because a rank has no values for other "
            f"stages' weights. {_ELSEWHERE}"
        )
