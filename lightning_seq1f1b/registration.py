"""Registers the strategy's names with Lightning, now if it is loaded, else the moment it is.

Lightning looks strategies up by name in a registry and has no entry point for them, so a package must be imported
first. Importing Lightning from here would make every use of this package import torch, even drawing a schedule.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_REGISTRY_MODULE = "lightning.pytorch.strategies"
NAMES = ("seq1f1b", "seq1f1bstrategy", "lightning_seq1f1b.seq1f1bstrategy")
"""Lightning lower-cases names. A class path without arguments reaches it as a name: `--trainer.strategy=CLASS_PATH`."""

REFUSED = ("seq1f1b_spawn", "seq1f1b_fork", "seq1f1b_forkserver", "seq1f1b_notebook")
"""Names that one tries who knows those of DDP."""


def register_when_lightning_loads() -> None:
    """Register now when Lightning's strategies are imported already, else right after they are."""
    module = sys.modules.get(_REGISTRY_MODULE)
    if module is not None and hasattr(module, "StrategyRegistry"):
        _register(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register(module: ModuleType) -> None:
    for name in NAMES:
        module.StrategyRegistry.register(
            name, _make, description="Sequence-level one-forward-one-backward pipeline parallelism", override=True
        )
    for name in REFUSED:
        module.StrategyRegistry.register(name, partial(_refuse, name), description="refused by name", override=True)


def _refuse(name: str, **init_params: Any) -> Any:
    raise ValueError(
        f"there is no strategy {name!r}: Seq1F1BStrategy needs processes that run your whole program, and one that is "
        "spawned or forked, as in a notebook, runs a function only. Put the program into a file (in a notebook: "
        "%%writefile train.py) and start that, by python or torchrun, with strategy='seq1f1b'"
    )


def _make(**init_params: Any) -> Any:
    from lightning_seq1f1b.strategy.seq1f1b import Seq1F1BStrategy

    return Seq1F1BStrategy(**init_params)


class _AfterImport(MetaPathFinder):
    """Lets the ordinary finders import the registry's module, then registers; it serves once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
