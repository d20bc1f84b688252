"""Rotary embeddings whose frequencies depend on the length of the row, shown the row's end while a chunk runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class RowEnd:
    """Shows length-dependent rotary embeddings the last position of the row, whichever chunk runs.

    The rope types "dynamic" and "longrope" choose their frequencies by the largest position they are given. A chunk's
    positions end too early, so one column with the row's last position is added to them and taken off the result.

    Args:
        model: the model whose rotary embeddings are looked for.

    Attributes:
        wanted: whether the model has any.
        position: 0-d, the row's last position, while a chunk runs; None leaves the embeddings as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.position: Tensor | None = None
        self.wanted = False
        for module in length_dependent(model):
            self.wanted = True
            module.register_forward_pre_hook(self._add, with_kwargs=True)
            module.register_forward_hook(self._remove)

    def _add(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if self.position is None:
            return args, kwargs
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": self._longer(kwargs["position_ids"])}
        return (args[0], self._longer(args[1]), *args[2:]), kwargs

    def _longer(self, positions: Tensor) -> Tensor:
        assert self.position is not None
        return torch.cat([positions, self.position.to(positions.dtype).expand(*positions.shape[:-1], 1)], dim=-1)

    def _remove(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.position is None:
            return output
        if isinstance(output, tuple):
            return tuple(tensor[:, :-1] for tensor in output)
        return output[:, :-1]


def longest_unchanged(model: nn.Module) -> int | None:
    """Tokens up to which no rotary embedding of the model depends on the length of the row; None for any number."""
    limits: list[int] = []
    for module in length_dependent(model):
        parameters = getattr(module.config, "rope_parameters", None) or {}
        by_kind = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
        found = [each.get("original_max_position_embeddings") for each in by_kind]
        found.append(getattr(module, "original_max_seq_len", None))
        # One less: at the limit itself a frequency that grew before is not taken back.
        limits += [int(limit) - 1 for limit in found if limit is not None]
    return min(limits, default=None)


def length_dependent(model: nn.Module) -> Iterator[nn.Module]:
    """The rotary embeddings of a model whose frequencies depend on the length of the row."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                yield module
                break
