"""What the last stage makes of the logits in place of the model's own loss, and how that adds up over chunks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lightning_seq1f1b.runtime.batching import Chunk, Microbatch

LOSS = "loss"
LOGITS = "logits"


class Tally(Protocol):
    """What an objective has seen of one microbatch; the last stage's state asks it for what it is asked itself."""

    def add(self, chunk: Chunk, logits: Tensor) -> Tensor:
        """Take in a chunk's logits, [rows, tokens, vocabulary]; returns what its backward starts from."""
        ...

    def seed(self, chunk: int) -> Tensor | None:
        """The gradient for what `add` has returned; see `runtime.stage.MicrobatchState.seed`."""
        ...

    def result(self) -> Mapping[str, Tensor]:
        """What the microbatch gives; see `runtime.stage.MicrobatchState.result`."""
        ...


class Objective(Protocol):
    """What is asked of a batch other than the model's own loss alone.

    Attributes:
        own_loss: whether the model's own loss is to be computed too, where there are labels.
        tensors: further tensors of the batch, [rows, length, ...], which chunks are given as `Chunk.extras`.
        row_tensors: further ones that the objective itself looks into, [rows].
        rows_together: neighbouring rows, from the first on, that must share a microbatch.
    """

    @property
    def own_loss(self) -> bool: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def row_tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def rows_together(self) -> int: ...

    def open(self, microbatch: Microbatch) -> Tally:
        """The empty tally of a microbatch."""
        ...


@dataclass(frozen=True, eq=False)
class SummedObjective:
    """Sums over tokens, added up over the chunks of a microbatch and combined to its loss.

    Attributes:
        sums: given logits [rows, tokens, vocabulary], the chunk and its microbatch, returns sums over the chunk's
            tokens by name: 0-d, or one value for each row, [rows].
        combine: given all sums of a microbatch and the microbatch, returns its "loss", 0-d, and metrics, 0-d or one
            value for each row; None when the sums are them already.
        tensors: see `Objective`.
        row_tensors: see `Objective`.
        rows_together: see `Objective`.
        identity: equal for objectives that compute the same.
    """

    sums: Callable[[Tensor, Chunk, Microbatch], Mapping[str, Tensor]]
    combine: Callable[[Mapping[str, Tensor], Microbatch], Mapping[str, Tensor]] | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    row_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    rows_together: int = 1
    identity: Hashable = None

    @property
    def own_loss(self) -> bool:
        """Never: the sums stand in its place."""
        return False

    def open(self, microbatch: Microbatch) -> SumsTally:
        """The empty tally of a microbatch."""
        return SumsTally(self, microbatch)

    def chunk_sums(self, logits: Tensor, chunk: Chunk, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """The sums of a chunk.

        Raises:
            ValueError: a value is no tensor, or not of a shape that can be added up.
        """
        values = self.sums(logits, chunk, microbatch)
        for name, value in values.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"chunk_loss returned {name!r} as {type(value).__name__}; it returns tensors")
            if value.shape not in ((), (microbatch.rows,)):
                raise ValueError(
                    f"chunk_loss returned {name!r} of shape {list(value.shape)}; it returns sums over tokens, each a "
                    f"scalar or one value for each row, [{microbatch.rows}]"
                )
        return values

    def combined(self, sums: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """What a microbatch gives, of the sums over all its tokens.

        Raises:
            ValueError: there is no loss, or a value is of a shape that cannot be added up.
        """
        given = sums if self.combine is None else self.combine(sums, microbatch)
        who = "chunk_loss" if self.combine is None else "combine"
        if not isinstance(given, Mapping) or LOSS not in given:
            raise ValueError(f"{who} returned no {LOSS!r}, but {_listed(given)}; it returns the loss under that name")
        for name, value in given.items():
            shapes = ((),) if name == LOSS else ((), (microbatch.rows,))
            if not isinstance(value, Tensor) or value.shape not in shapes:
                kind = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"as {type(value).__name__}"
                wanted = "a scalar" if name == LOSS else f"a scalar or one value for each row, [{microbatch.rows}]"
                raise ValueError(f"{who} returned {name!r} {kind}; it returns tensors, this one {wanted}")
        return given


def _listed(given: object) -> str:
    return ", ".join(map(repr, given)) if isinstance(given, Mapping) else type(given).__name__


class SumsTally:
    """Implements `Tally` for a `SummedObjective`."""

    def __init__(self, objective: SummedObjective, microbatch: Microbatch) -> None:
        self._objective, self._microbatch = objective, microbatch
        self._sums: dict[str, Tensor] = {}
        self._attached: dict[int, list[str]] = {}
        self._given: Mapping[str, Tensor] | None = None

    def add(self, chunk: Chunk, logits: Tensor) -> Tensor:
        """Add a chunk's sums; returns those that carry a gradient, one behind the other."""
        values = self._objective.chunk_sums(logits, chunk, self._microbatch)
        index, first = chunk.unit.chunk, not self._attached
        if not first and values.keys() != self._sums.keys():
            raise ValueError(
                f"chunk_loss returned {_listed(values)} for chunk {index}, but {_listed(self._sums)} for the one "
                "before; it returns the same names for every chunk"
            )
        for name, value in values.items():
            # In float32 at least: a bfloat16 sum would lose the small chunks.
            value = value.detach().to(_wide(value))
            self._sums[name] = value if first else self._sums[name] + value
        # Without combine a metric is only read: its graph must not be part of the backward.
        names = [LOSS] if self._objective.combine is None else sorted(values)
        self._attached[index] = [name for name in names if name in values and values[name].requires_grad]
        flat = [values[name].reshape(-1).to(_wide(values[name])) for name in self._attached[index]]
        return torch.cat(flat) if flat else logits.new_zeros(1)

    def seed(self, chunk: int) -> Tensor | None:
        """The gradients of the microbatch's loss with respect to the sums that `add` has returned."""
        self.result()
        gradients = [
            (torch.zeros_like(total) if total.grad is None else total.grad).reshape(-1)
            for total in (self._sums[name] for name in self._attached[chunk])
        ]
        return torch.cat(gradients) if gradients else None

    def result(self) -> Mapping[str, Tensor]:
        """The loss and the metrics; computed at the first call, which is after the forward of the last chunk."""
        if self._given is None:
            if torch.is_grad_enabled():
                for name in set().union(*self._attached.values()):
                    self._sums[name].requires_grad_()
            given = self._objective.combined(self._sums, self._microbatch)
            if given[LOSS].requires_grad:
                with torch.autocast(given[LOSS].device.type, enabled=False):
                    given[LOSS].backward()  # type: ignore[no-untyped-call]
            self._given = {name: value.detach() for name, value in given.items()}
        return self._given


def _wide(value: Tensor) -> torch.dtype:
    return torch.promote_types(value.dtype, torch.float32) if value.is_floating_point() else value.dtype


def added_up(
    results: Sequence[Mapping[str, Tensor]], microbatches: Sequence[Microbatch], rows: int
) -> dict[str, Tensor]:
    """What the microbatches of a batch give together, but for logits.

    Args:
        results: of every microbatch.
        microbatches: the batch, cut.
        rows: of the batch.

    Returns:
        Scalars, added up, and values for each row, [rows], in the batch's order.

    Raises:
        ValueError: the microbatches give different names or kinds of values.
    """
    kinds = [{name: value.ndim for name, value in each.items() if name != LOGITS} for each in results]
    odd = next((kind for kind in kinds if kind != kinds[0]), None)
    if odd is not None:
        raise ValueError(f"the loss gave {odd} for one microbatch and {kinds[0]} for another (dimensions by name)")
    total: dict[str, Tensor] = {}
    for name, ndim in kinds[0].items():
        values = [each[name] for each in results]
        if ndim:
            total[name] = values[0].new_zeros(rows)
            for value, microbatch in zip(values, microbatches, strict=True):
                total[name][list(microbatch.rows_of_batch)] = value
        else:
            total[name] = torch.stack(values).sum()
    return total


class EvaluationLogits:
    """The logits of whole rows, and the model's own loss where the batch has labels."""

    own_loss = True
    rows_together = 1

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """None."""
        return {}

    @property
    def row_tensors(self) -> Mapping[str, Tensor]:
        """None."""
        return {}

    def open(self, microbatch: Microbatch) -> LogitsTally:
        """The empty tally of a microbatch."""
        return LogitsTally()


class LogitsTally:
    """Implements `Tally` for `EvaluationLogits`; no backward follows."""

    def __init__(self) -> None:
        self._logits: list[Tensor] = []

    def add(self, chunk: Chunk, logits: Tensor) -> Tensor:
        """Keep a chunk's logits."""
        self._logits.append(logits.detach())
        return logits

    def seed(self, chunk: int) -> None:
        """None: nothing is trained."""

    def result(self) -> Mapping[str, Tensor]:
        """The logits, [rows, length, vocabulary]."""
        return {LOGITS: torch.cat(self._logits, dim=1)}
