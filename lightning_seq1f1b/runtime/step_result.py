"""What a pipelined step ends with, brought from the last stage to all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_seq1f1b.runtime.batching import Microbatch
from lightning_seq1f1b.runtime.copied_gradients import CopiedGradients
from lightning_seq1f1b.runtime.objective import LOGITS, LOSS, added_up


@dataclass(frozen=True)
class StepResult:
    """The same on all pipeline ranks; no tensor carries autograd.

    Attributes:
        loss: 0-d; None when nobody asked for one.
        metrics: by name, 0-d or one value for each row of the batch, [rows].
        logits: [rows, length, vocabulary] in the batch's order of rows, zero for padding that was not computed; None
            when nobody asked for them.
        trained: whether gradients were computed; not where nothing on any rank requires one.
        copied: gradients of this rank's parameters that other stages hold too, not yet in `.grad`.
    """

    loss: Tensor | None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None
    trained: bool = False
    copied: Sequence[CopiedGradients] = ()


@dataclass(frozen=True)
class _Told:
    """What the other ranks must know to take part.

    Attributes:
        names: of all values; whether each is one for every row.
        logits: their vocabulary and dtype, if there are any.
    """

    names: Mapping[str, bool]
    logits: tuple[int, torch.dtype] | None


class Sharing:
    """Hands out what only the last stage has.

    The last stage ends a step first and does not wait until the others take what it has sent.

    Args:
        source: the rank of the last stage.
        values: group of the pipeline for tensors on `device`.
        names: group of the pipeline for objects.
        dtype: of losses and metrics.
        device: of everything that is handed out.
    """

    def __init__(
        self,
        source: int,
        values: dist.ProcessGroup,
        names: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._source, self._values, self._names = source, values, names
        self._dtype, self._device = dtype, device
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def loss(self, results: Sequence[Mapping[str, Tensor]] | None) -> StepResult:
        """The step's result when only the model's own loss was asked for; `results` are the executor's."""
        self._let_go()
        given = {} if results is None else {LOSS: torch.stack([each[LOSS] for each in results]).sum()}
        return StepResult(self._handed_out(given, {LOSS: None})[LOSS])

    def everything(
        self,
        results: Sequence[Mapping[str, Tensor]] | None,
        microbatches: Sequence[Microbatch],
        shape: tuple[int, int],
    ) -> StepResult:
        """The step's result under an objective; `shape` is the batch's, rows and tokens.

        Raises:
            ValueError: on the last stage, when the microbatches give different metrics.
        """
        self._let_go()
        told: _Told | None = None
        given: dict[str, Tensor] = {}
        if results is not None:
            given = added_up(results, microbatches, shape[0])
            logits = results[0].get(LOGITS)
            names = {name: value.ndim > 0 for name, value in sorted(given.items())}
            told = _Told(names, None if logits is None else (logits.shape[-1], logits.dtype))
        asked = self._heard(told)
        values = self._handed_out(given, {name: shape[0] if of_rows else None for name, of_rows in asked.names.items()})
        whole = None
        if asked.logits is not None:
            whole = self._gathered(results, microbatches, (*shape, asked.logits[0]), asked.logits[1])
        return StepResult(values.pop(LOSS, None), values, whole)

    def _handed_out(self, given: Mapping[str, Tensor], rows: Mapping[str, int | None]) -> dict[str, Tensor]:
        """Values by name, each 0-d or of so many rows; `given` is empty on all ranks but the last stage's."""
        sizes = [1 if count is None else count for count in rows.values()]
        shared = torch.zeros(sum(sizes), dtype=self._dtype, device=self._device)
        pieces = dict(zip(rows, torch.split(shared, sizes), strict=True))
        for name, value in given.items():
            pieces[name].copy_(value)
        if pieces:
            self._broadcast(shared, self._values)
        return {name: piece[0] if rows[name] is None else piece for name, piece in pieces.items()}

    def _heard(self, told: _Told | None) -> _Told:
        """What the last stage tells; None on the others."""
        text = torch.frombuffer(bytearray(pickle.dumps(told)), dtype=torch.uint8)
        size = torch.tensor([len(text)])
        self._broadcast(size, self._names)
        if told is not None:
            self._broadcast(text, self._names)
            return told
        text = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(text, self._names)
        heard: _Told = pickle.loads(text.numpy().tobytes())
        return heard

    def _broadcast(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Receive the last stage's values, or on it let a copy of them go."""
        if dist.get_rank() == self._source:
            sent = tensor.clone()
            self._sent.append((dist.broadcast(sent, self._source, group=group, async_op=True), sent))
        else:
            dist.broadcast(tensor, self._source, group=group)

    def _let_go(self) -> None:
        """Forget what was sent in the step before: the others have taken it, or would not be in this one."""
        for work, _ in self._sent:
            assert work is not None
            work.wait()
        self._sent.clear()

    def _gathered(
        self,
        results: Sequence[Mapping[str, Tensor]] | None,
        microbatches: Sequence[Microbatch],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> Tensor:
        whole = torch.zeros(shape, dtype=dtype, device=self._device)
        for place, microbatch in enumerate(microbatches):
            piece = whole.new_empty(microbatch.rows, microbatch.length, shape[2])
            if results is not None:
                piece.copy_(results[place][LOGITS])
            dist.broadcast(piece, self._source, group=self._values)
            whole[list(microbatch.rows_of_batch), : microbatch.length] = piece
        return whole
