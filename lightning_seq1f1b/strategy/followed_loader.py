"""Training data that a run can go on with in the middle of an epoch, and loaders whose ends all processes share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lightning_seq1f1b.strategy.random_state import RandomState, drawing_from, random_state

Meeting = Callable[[int, bool], None]
"""Compares with all processes: the number of the batch that is due, and whether the loader has ended instead."""

_END = object()


@dataclass
class EpochStart:
    """What the order of an epoch's rows follows from, beside the loader itself.

    Attributes:
        random: the process's random states.
        generator: state of the loader's generator, where the user gave it one.
        order: see `order_of`.
    """

    random: RandomState
    generator: torch.Tensor | None
    order: str | int | None

    @classmethod
    def now(cls, loader: object) -> EpochStart:
        """Of an epoch that begins at this moment."""
        generator = getattr(loader, "generator", None)
        return cls(random_state(), None if generator is None else generator.get_state(), order_of(loader))


def order_of(loader: object) -> str | int | None:
    """The order in which a loader's rows come, over all replicas.

    Returns:
        "random" where torch's sampler shuffles, "given" where some other one chooses, the seed where the sampler with
        which Lightning deals rows out to replicas shuffles, and None where rows are dealt out otherwise.
    """
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        if type(sampler) not in (DistributedSampler, DistributedSamplerWrapper):
            return None
        return sampler.seed if sampler.shuffle else "given"
    if sampler is None or not has_plain_batches(loader):
        return None
    plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler)
    return "random" if plain else "given"


def rows_in_order(
    loader: DataLoader[Any], order: str | int, epoch: int, num_replicas: int, replica: int
) -> Iterable[int]:
    """The rows of one replica, where all replicas together have some order.

    Args:
        loader: whose rows they are.
        order: as of `order_of`; of any loader over the same dataset.
        epoch: its number.
        num_replicas: how many replicas there are.
        replica: the one whose rows these are.
    """
    chosen: Any = loader.sampler
    data: Any = loader.dataset
    if isinstance(chosen, DistributedSamplerWrapper):
        wrapped: Any = chosen.dataset
        chosen = wrapped._sampler
    elif isinstance(chosen, (DistributedSampler, RandomSampler)):
        chosen = SequentialSampler(data)
    if order == "random":
        chosen = RandomSampler(data, generator=loader.generator)
    seed = order if isinstance(order, int) else None
    rows = DistributedSamplerWrapper(chosen, num_replicas, replica, shuffle=seed is not None, seed=seed or 0)
    rows.set_epoch(epoch)
    return rows


@dataclass
class Resumption:
    """How the first epoch of a resumed run goes on.

    Attributes:
        start: what its order was drawn from.
        consumed: batches of it that were trained on.
        rows: its rows, dealt out to this replica, where the loader's own sampler has another order.
    """

    start: EpochStart
    consumed: int
    rows: Iterable[int] | None = None


class Follower:
    """Follows one loader through its epochs.

    Args:
        loader: of the user, or what Lightning has made of it.
        resumption: of its first epoch; None where that begins.
    """

    def __init__(self, loader: object, resumption: Resumption | None = None) -> None:
        self._loader = loader
        self._resumption = resumption
        self.start: EpochStart | None = None
        """What the order of the current epoch was drawn from."""

    def begin(self, iterable: Iterable[Any], size: int = 1, *, ahead: bool) -> tuple[Iterator[Any], int]:
        """An iterator for the coming epoch, behind what was consumed of it; and how many items that was.

        Args:
            iterable: gives the epoch's items.
            size: how many items make a batch.
            ahead: whether one more item than was consumed had been taken when the checkpoint was written.
        """
        resumption, self._resumption = self._resumption, None
        if resumption is None:
            self.start = EpochStart.now(self._loader)
            return iter(iterable), 0
        self.start = resumption.start
        consumed = resumption.consumed * size
        generator: torch.Generator | None = getattr(self._loader, "generator", None)
        with drawing_from(resumption.start.random):
            if generator is not None and resumption.start.generator is not None:
                generator.set_state(resumption.start.generator)
            iterator = iter(iterable if resumption.rows is None else resumption.rows)
            for _ in islice(iterator, consumed):
                pass
            following = list(islice(iterator, int(ahead)))
        return chain(following, iterator), consumed


class FollowedSampler(Sampler[int]):
    """The rows of a sampler, and on a resumed run those that its epoch has left. Nothing of the others is loaded.

    Args:
        loader: whose sampler it is; one with batches of a fixed size.
        follower: of the loader.
    """

    def __init__(self, loader: DataLoader[Any], follower: Follower) -> None:
        self.loader, self.follower = loader, follower

    def __iter__(self) -> Iterator[int]:
        # Samplers draw what they need when they are asked for their first row, if not all of it.
        rows, _ = self.follower.begin(self.loader.sampler, self.loader.batch_size or 1, ahead=True)
        yield from rows

    def __len__(self) -> int:
        return len(self.loader.sampler)  # type: ignore[arg-type]  # as torch's BatchSampler takes it


class FollowedLoader:
    """A loader whose batches are followed one by one: a dataset without rows to choose from, or batches of the user's.

    Everything else about it is the loader's. A resumed run loads what it skips, since nobody else knows its size.

    Args:
        loader: any iterable of batches.
        follower: of the loader; None where it need not go on in the middle of an epoch.
        meeting: where the processes must compare how far their loaders go; called for every batch.
        limit: of the batches that a run takes; the loader's end does not count behind it.
    """

    def __init__(self, loader: Iterable[Any], follower: Follower | None, meeting: Meeting | None, limit: float) -> None:
        vars(self).update(loader=loader, follower=follower, _meeting=meeting, _limit=limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.loader, name, value)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self.follower is None:
            return self._met(iter(self.loader), 0)
        # Lightning takes one batch more than it gives where it cannot know the last one otherwise.
        return self._met(*self.follower.begin(self.loader, ahead=sized_len(self.loader) is None))

    def _met(self, iterator: Iterator[Any], consumed: int) -> Iterator[Any]:
        for number in count(consumed):
            batch = next(iterator, _END)
            if self._meeting is not None and number < self._limit:
                self._meeting(number, batch is _END)
            if batch is _END:
                return
            yield batch


class FollowedStatefulLoader(FollowedLoader):
    """One that keeps its own place, which Lightning saves and restores."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the loader's."""
        self.loader.load_state_dict(state_dict)


def has_plain_batches(loader: object) -> bool:
    """Whether a loader makes batches of one size of the rows that a sampler chooses, as torch does by default."""
    plain = isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler
    return plain and not has_iterable_dataset(loader)


def follower_of(loader: object) -> Follower | None:
    """Who follows a loader of the fit loop; None where nobody does."""
    if isinstance(loader, FollowedLoader):
        return loader.follower
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return sampler.follower if isinstance(sampler, FollowedSampler) else None
