"""Runs the same fit at several places: one device, data parallel, pipeline stages, and both together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from support.processes import ProcessFailedError, run_processes
from support.training import QUIET, FineTune, Rows
from torch.utils.data import DataLoader

from lightning_seq1f1b import Seq1F1BStrategy

SHORT = 29
"""Tokens of a row where nothing depends on the length: odd, and longer than the window of windowed models."""


@dataclass(frozen=True)
class Where:
    """The place of a run.

    Attributes:
        devices: number of processes.
        strategy: the name of a strategy of Lightning's, or the arguments of `Seq1F1BStrategy`.
    """

    devices: int = 1
    strategy: str | tuple[tuple[str, Any], ...] = "auto"


def stages(devices: int = 2, **arguments: Any) -> Where:
    """Our strategy; three chunks where nothing else is said."""
    return Where(devices, tuple({"num_chunks": 3, **arguments}.items()))


ONE_DEVICE = Where()
TWO_STAGES = stages()
DATA_PARALLEL = Where(2, "ddp")
TWO_BY_TWO = stages(4, num_stages=2)

Case = Callable[[Where], Any]
"""Runs something at a place; the result pickles."""


def fit(
    where: Where,
    module: L.LightningModule,
    train: DataLoader,
    val: DataLoader | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    ckpt_path: str | None = None,
    **options: Any,
) -> L.Trainer:
    """Fit a module from the same random state everywhere; `options` are the Trainer's. Two epochs by default."""
    torch.manual_seed(0)
    strategy = where.strategy if isinstance(where.strategy, str) else Seq1F1BStrategy(**dict(where.strategy))
    options = {**QUIET, "max_epochs": 2, **options}
    trainer = L.Trainer(devices=where.devices, strategy=strategy, callbacks=list(callbacks), **options)
    trainer.fit(module, train, val, ckpt_path=ckpt_path)
    return trainer


def rows(count: int = 8, batch_size: int = 3, *, length: int = SHORT, seed: int = 1, **options: Any) -> DataLoader:
    """A loader of random rows; `options` are the DataLoader's."""
    return DataLoader(Rows(count, length=length, seed=seed), batch_size=batch_size, **options)


def weights(trainer: L.Trainer) -> dict[str, torch.Tensor]:
    """The whole module's weights, on rank 0 at least."""
    return trainer.strategy.lightning_module_state_dict()


def difference(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between two sets of weights, whose names must agree."""
    assert list(got) == list(expected)
    return max(float((got[name].double() - expected[name].double()).abs().max()) for name in expected)


def fitted_weights(where: Where, module: FineTune | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after an ordinary fit."""
    return weights(fit(where, module or FineTune(), rows(), **options))


def everywhere(cases: tuple[Case, ...], where: Where) -> dict[Case, list[Any]]:
    """The results of several cases at a place, by rank; all cases share one start of the processes."""
    results = _results(cases, where)
    if isinstance(results, ProcessFailedError):
        raise results
    return results


@functools.cache
def _results(cases: tuple[Case, ...], where: Where) -> dict[Case, list[Any]] | ProcessFailedError:
    if where == ONE_DEVICE:
        return {case: [case(where)] for case in cases}
    try:
        by_rank = run_processes(_all, where.devices, cases, where)
    except ProcessFailedError as error:
        return error  # kept like a result: every test that needs the cases fails at once
    return {case: [results[index] for results in by_rank] for index, case in enumerate(cases)}


def _all(rank: int, cases: tuple[Case, ...], where: Where) -> list[Any]:
    return [case(where) for case in cases]
