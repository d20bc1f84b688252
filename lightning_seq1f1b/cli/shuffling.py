"""Orders of rows that depend on the seed and the epoch alone, not on the strategy or the number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import Sampler


class EpochShuffle(Sampler[int]):
    """A new permutation of `0 .. length - 1` every epoch.

    torch's own shuffling sampler draws from the process's random state, so that dropout, the number of stages, or a
    resumed run would change the order of the data. This one does not.

    Args:
        length: how many rows there are.
        seed: the seed of all epochs.
        epoch: tells the current epoch.
    """

    def __init__(self, length: int, seed: int, epoch: Callable[[], int]) -> None:
        self.length = length
        self.seed = seed
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length, generator=_generator(self.seed, self.epoch())).tolist())

    def __len__(self) -> int:
        return self.length


BATCHES_OF_A_GROUP = 50
"""Batches that are made together of rows sorted by length: enough for alike lengths, few enough to stay random."""


class LengthGroups(Sampler[int]):
    """A new order every epoch, in which the rows of a batch have similar lengths, so that little is padded.

    Rows are shuffled; of every group of so many batches they are sorted by length and dealt out to batches; then the
    batches are shuffled. One that is not full stays last.

    Args:
        lengths: tokens of every row.
        batch_size: rows of a batch, over all replicas.
        seed: the seed of all epochs.
        epoch: tells the current epoch.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, epoch: Callable[[], int]) -> None:
        self.lengths = lengths
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = _generator(self.seed, self.epoch())
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        together = self.batch_size * BATCHES_OF_A_GROUP
        batches: list[list[int]] = []
        for first in range(0, len(order), together):
            group = sorted(order[first : first + together], key=lambda row: -self.lengths[row])
            batches += [group[start : start + self.batch_size] for start in range(0, len(group), self.batch_size)]
        full = sum(len(batch) == self.batch_size for batch in batches)
        shuffled = [*torch.randperm(full, generator=generator).tolist(), *range(full, len(batches))]
        return iter([row for index in shuffled for row in batches[index]])

    def __len__(self) -> int:
        return len(self.lengths)


def _generator(seed: int, epoch: int) -> torch.Generator:
    # An affine mix keeps (seed 0, epoch 1) apart from (seed 1, epoch 0).
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)
