"""Counts the tensors that are alive between the actions of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.schedule.actions import Action


class LiveBytes(TorchDispatchMode):
    """Sums the storages that operations of this thread have made and that are still alive.

    Args:
        excluded: tensors whose storages do not count, such as weights and their gradients.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        super().__init__()
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in excluded}
        self._sizes = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note the storages of its results."""
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, result)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._excluded:
            self._sizes[storage] = storage.nbytes()

    def held(self) -> int:
        """What is alive now."""
        return sum(self._sizes.values())


class SampledTrace(StepTrace):
    """Samples after every compute action instead of timing it.

    Args:
        live: what is sampled.
    """

    def __init__(self, live: LiveBytes) -> None:
        super().__init__(rank=0, device=torch.device("cpu"))
        self._live = live
        self.samples: list[tuple[Action, int]] = []

    @property
    def peak(self) -> int:
        """The most that was alive after an action."""
        return max(held for _, held in self.samples)

    @contextmanager
    def measure(self, action: Action) -> Iterator[None]:
        """Run the body, then sample."""
        yield
        self.samples.append((action, self._live.held()))
