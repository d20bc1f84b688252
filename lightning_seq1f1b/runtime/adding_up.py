"""A numeric trial of a loss that a user gives for chunks: whether its parts add up to the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_seq1f1b.runtime.batching import IGNORE_INDEX, Microbatch, cut_groups
from lightning_seq1f1b.runtime.objective import SummedObjective, added_up
from lightning_seq1f1b.runtime.row_groups import RowGroup
from lightning_seq1f1b.schedule.spans import spans

_CHUNKS = (2, 2, 3)
"""Tokens of the chunks of a trial; nothing in the second is supervised."""

_TOLERANCE = 1e-3


def check_adds_up(
    objective: SummedObjective, batch: Mapping[str, Tensor], vocab_size: int, num_microbatches: int
) -> None:
    """Refuse a loss of which chunks and microbatches give another sum than all tokens together.

    It is computed without autograd on small random logits and labels, and on the first rows and tokens of the batch's
    own tensors.

    Args:
        objective: the loss.
        batch: the batch with the objective's tensors, as for `cut_groups`.
        vocab_size: of the logits.
        num_microbatches: into how many the batch will be cut.

    Raises:
        ValueError: the parts do not add up, or padding counts.
    """
    together = objective.rows_together
    rows, device = together * min(num_microbatches, 2), batch["input_ids"].device
    tiny = _tiny(batch, rows, vocab_size)
    length = sum(_CHUNKS)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, length, vocab_size, generator=generator).to(device)
    whole = cut_groups(tiny, [RowGroup(tuple(range(rows)), length)], [spans([length])])
    apart = [RowGroup(tuple(range(first, first + together)), length) for first in range(0, rows, together)]
    parts = cut_groups(tiny, apart, [spans(_CHUNKS)] * len(apart))
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices), torch.autocast(device.type, enabled=False):
        expected, got = _total(objective, logits, whole), _total(objective, logits, parts)
        odd = _differing(expected, got)
        if odd is not None:
            raise ValueError(
                f"{odd!r} of the given loss does not add up: on small random logits it is {_shown(expected[odd])} "
                f"for {rows} row(s) of {length} tokens at once, but {_shown(got[odd])} for the sum of their chunks "
                f"of {', '.join(map(str, _CHUNKS))} tokens{' and microbatches' if len(apart) > 1 else ''}. chunk_loss "
                "must return sums over tokens (for a mean, divide by a number of the whole batch, such as the argument "
                "num_items_in_batch), and combine a sum over rows, or over rows_together rows that belong together"
            )
        if "attention_mask" in tiny:
            logits[0, -1] = -2 * logits[0, -1].flip(0)
            odd = _differing(expected, _total(objective, logits, whole))
            if odd is not None:
                raise ValueError(
                    f"{odd!r} of the given loss counts padding, whose logits are not defined: leave out tokens where "
                    f"labels are {IGNORE_INDEX}, or where the argument attention_mask is 0"
                )


def _tiny(batch: Mapping[str, Tensor], rows: int, vocab_size: int) -> dict[str, Tensor]:
    """The first rows, of as many tokens as a trial has, with labels and weights that make it tell something."""
    length, device = sum(_CHUNKS), batch["input_ids"].device
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(vocab_size, (rows, length), generator=generator)
    labels[:, 3:5] = labels[0, 6] = IGNORE_INDEX
    tokens = torch.arange(length, device=device) % batch["input_ids"].shape[1]
    shared = ("labels", "attention_mask", "position_ids", "num_items_in_batch")
    tiny = {name: tensor[:rows, tokens] for name, tensor in batch.items() if name not in shared}
    tiny["labels"] = labels.to(device)
    if "num_items_in_batch" in batch:
        tiny["num_items_in_batch"] = batch["num_items_in_batch"]
    if "loss_weights" in batch:
        weights = torch.rand(rows, length, generator=generator) + 0.5
        tiny["loss_weights"] = weights.to(batch["loss_weights"])
    if "attention_mask" in batch:
        mask = torch.ones(rows, length, dtype=torch.int64, device=device)
        mask[0, -1] = 0
        tiny["attention_mask"] = mask
    return tiny


def _total(objective: SummedObjective, logits: Tensor, microbatches: Sequence[Microbatch]) -> dict[str, Tensor]:
    results = []
    for microbatch in microbatches:
        tally, of_rows = objective.open(microbatch), logits[list(microbatch.rows_of_batch)]
        for chunk in microbatch.chunks:
            tally.add(chunk, of_rows[:, chunk.span.start : chunk.span.stop].contiguous())
        results.append(tally.result())
    return added_up(results, microbatches, len(logits))


def _differing(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str | None:
    for name, value in expected.items():
        if not torch.allclose(got[name].double(), value.double(), rtol=_TOLERANCE, atol=_TOLERANCE):
            return name
    return None


def _shown(value: Tensor) -> str:
    return ", ".join(f"{number:.5g}" for number in value.double().reshape(-1).tolist())
