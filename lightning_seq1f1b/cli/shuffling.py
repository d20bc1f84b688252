"""An order of rows that depends on the seed and the epoch alone, not on the strategy or the number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
        # An affine mix keeps (seed 0, epoch 1) apart from (seed 1, epoch 0).
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch())
        return iter(torch.randperm(self.length, generator=generator).tolist())

    def __len__(self) -> int:
        return self.length
