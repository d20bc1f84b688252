"""Read some modules of a pretrained model; the others stay on the meta device, and their tensors on the disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Load = Callable[..., Any]
"""`PreTrainedModel.from_pretrained` as a function: of a class of models, then of its own arguments."""


class AdaptersFoundError(Exception):
    """The directory holds adapters, which transformers puts into the model after its weights."""


class _Built(Exception):  # noqa: N818 (no error: the way out of from_pretrained before any weight is read)
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model


@dataclass(frozen=True)
class Mismatch:
    """How a checkpoint differs from what one rank reads of it.

    Attributes:
        missing: names of the model's tensors that it does not have.
        surplus: names of its tensors that have no place in the modules that are read.
        shapes: lines about tensors of another shape.
        untied: lines about weights that the config ties, and the checkpoint has twice with different values.
    """

    missing: frozenset[str]
    surplus: frozenset[str]
    shapes: tuple[str, ...]
    untied: tuple[str, ...]


def build_empty(cls: type[PreTrainedModel], load: Load, *args: Any, **kwargs: Any) -> PreTrainedModel:
    """The model that `from_pretrained` would fill, on the meta device with tied weights tied; no weight is read.

    Args:
        cls: the class to load.
        load: transformers' own `from_pretrained`.
        args: of `from_pretrained`.
        kwargs: of `from_pretrained`.
    """

    def leave(model: PreTrainedModel) -> None:
        raise _Built(model)

    try:
        load(_variant(cls, leave), *args, **kwargs)
    except _Built as built:
        built.model.__class__ = cls
        built.model.tie_weights()
        return built.model
    raise AssertionError("from_pretrained made no model")


def load_without(
    cls: type[PreTrainedModel], hidden: Sequence[str], load: Load, *args: Any, **kwargs: Any
) -> tuple[PreTrainedModel, Mismatch]:
    """Let `from_pretrained` read everything but some modules, which the model has on the meta device.

    Names, dtypes, conversions and ties are transformers' own business; tensors without a place are never read.

    Args:
        cls: the class to load.
        hidden: full names of the modules to leave out, none inside another.
        load: transformers' own `from_pretrained`.
        args: of `from_pretrained`.
        kwargs: of `from_pretrained`.

    Raises:
        AdaptersFoundError: the directory holds adapters; what has been loaded then is of no use.
    """
    originals: dict[str, nn.Module] = {}
    ties: dict[str, str] = {}

    def hide(model: PreTrainedModel) -> None:
        ties.update(model.all_tied_weights_keys)
        for name in hidden:
            originals[name] = model.get_submodule(name)
            _put(model, name, nn.Module())
        present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        model.all_tied_weights_keys = {target: source for target, source in ties.items() if {target, source} <= present}

    with _reports() as reports:
        try:
            # Mismatched tensors are made anew then, and reported instead of raised, so that all of them can be listed.
            told = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, info = load(_variant(cls, hide), *args, **{**kwargs, **told})
        except RuntimeError as error:
            raise RuntimeError("\n".join([str(error), *reports])) from error
    model.__class__ = cls
    for name, module in originals.items():
        _put(model, name, module.eval())
    model.all_tied_weights_keys = ties
    untied = _untied(model, ties, hidden)
    model.tie_weights()
    return model, Mismatch(
        frozenset(info["missing_keys"]),
        frozenset(info["unexpected_keys"]),
        tuple(f"{name}: {list(saved)} saved, {list(here)} here" for name, saved, here in info["mismatched_keys"]),
        untied,
    )


def fill(model: nn.Module, whole: nn.Module) -> None:
    """Give what is on the meta device in a model the values of another one that has the same modules.

    Args:
        model: changed in place; what it holds already stays, and so do dtypes and `requires_grad`.
        whole: with every value.
    """
    theirs = dict(whole.named_modules(remove_duplicate=False))
    for place, module in model.named_modules(remove_duplicate=False):
        for table in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, table).items():
                if tensor is not None and tensor.is_meta:
                    value = getattr(theirs[place], table)[name].detach().to(tensor.dtype)
                    wrapped = nn.Parameter(value, tensor.requires_grad) if table == "_parameters" else value
                    getattr(module, table)[name] = wrapped


def _variant(cls: type[PreTrainedModel], built: Callable[[Any], None]) -> type[PreTrainedModel]:
    """A subclass by the same name, which calls a function right after an instance has been built."""

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.__init__(self, *args, **kwargs)
        built(self)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AdaptersFoundError

    body = {"__init__": build, "load_adapter": refuse, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), body)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    # Past nn.Module's registration, which would move it to the end.
    model.get_submodule(parent)._modules[attribute] = module


def _untied(model: PreTrainedModel, ties: dict[str, str], hidden: Sequence[str]) -> tuple[str, ...]:
    outside = tuple(f"{name}." for name in hidden)
    return tuple(
        f"{target} and {source} have different values, but are one weight by the config"
        for target, source in ties.items()
        if not target.startswith(outside)
        and not source.startswith(outside)
        and model.get_parameter(target) is not model.get_parameter(source)
    )


@contextmanager
def _reports() -> Iterator[list[str]]:
    """Inside, transformers' reports about the loading are collected, not logged: they find most tensors unexpected."""
    reports: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        is_report = "LOAD REPORT" in record.getMessage()
        if is_report:
            reports.append(record.getMessage())
        return not is_report

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield reports
    finally:
        logger.removeFilter(keep)
