"""Trial runs of equal models are made once a process: tests fit the same tiny model many times."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from lightning_seq1f1b.models import layer_shapes, split


def remember_trial_runs() -> None:
    """From now on the trial run before a cut, and the one that counts layers, are looked up for models seen before.

    What is seen for the first time is run as ever, and errors are never remembered.
    """
    split.probe = _remembered(split.probe, _of_model)  # type: ignore[attr-defined]  # a name that split imports
    layer_shapes.count_layers = _remembered(layer_shapes.count_layers, _of_config)


def _remembered(function: Callable[..., Any], key_of: Callable[..., Hashable]) -> Callable[..., Any]:
    results: dict[Hashable, Any] = {}

    @functools.wraps(function)
    def remembered(*args: Any) -> Any:
        key = key_of(*args)
        if key not in results:
            results[key] = function(*args)
        return results[key]

    return remembered


def _of_config(config: PreTrainedConfig, *rest: Hashable) -> Hashable:
    return type(config), config.to_json_string(use_diff=False), *rest


def _of_model(model: PreTrainedModel) -> Hashable:
    """Types, settings and tensors of all modules, the config, and the loss function."""
    modules = tuple((name, type(module), _settings(module)) for name, module in model.named_modules())
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    )
    return modules, tensors, _of_config(model.config), model.config._attn_implementation, model.loss_function


def _settings(module: nn.Module) -> Hashable:
    return tuple((name, value) for name, value in vars(module).items() if isinstance(value, (bool, int, float, str)))
