"""What a checkpoint keeps of a run's random numbers and of its place in the data, and how a run goes on from it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_seq1f1b.runtime.agreement import check_same_length, check_same_progress
from lightning_seq1f1b.strategy.followed_loader import (
    EpochStart,
    FollowedLoader,
    FollowedSampler,
    FollowedStatefulLoader,
    Follower,
    Meeting,
    Resumption,
    follower_of,
    has_plain_batches,
    order_of,
    rows_in_order,
)
from lightning_seq1f1b.strategy.loop_place import LoopPlace, loop_place
from lightning_seq1f1b.strategy.random_state import random_state, set_random_state

if TYPE_CHECKING:
    from lightning_seq1f1b.strategy.steps import PipelineSteps

ENTRY = "seq1f1b_data"
"""The entry of a checkpoint; other strategies do not look at it."""


class DataState:
    """The random numbers of a run and its place in the training data.

    Args:
        strategy: of the run.
    """

    def __init__(self, strategy: PipelineSteps) -> None:
        self._strategy = strategy
        self._saved: dict[str, Any] | None = None
        self._place: LoopPlace | None = None
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._num_loaders = 0

    # ---- saving ----------------------------------------------------------------------------------------------------

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Add what this run needs to go on; on all ranks together. Checkpoints of weights alone are left as they are.

        Args:
            checkpoint: what Lightning has collected; complete on rank 0.
        """
        if "optimizer_states" not in checkpoint:
            return
        strategy, topology = self._strategy, self._strategy.topology
        pipeline = strategy._pipeline
        assert pipeline is not None
        own: dict[str, Any] = {"random": random_state(strategy.root_device), "step": pipeline.random_state}
        training = self._trainer.train_dataloader
        loaders = [] if training is None else CombinedLoader(training).flattened
        if topology.pipeline_rank == 0:
            own["starts"] = [_start(loader) for loader in loaders]
            own["generators"] = [_generator_state(loader) for loader in loaders]
            own["loader_states"] = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader")
        gathered: list[Any] | None = [None] * topology.world_size if topology.rank == 0 else None
        dist.gather_object(own, gathered, group=strategy._process_groups.everyone, group_dst=0)
        if gathered is not None:
            batches = self._trainer.num_training_batches
            checkpoint[ENTRY] = {
                "stages": topology.num_stages,
                "replicas": topology.num_replicas,
                "epoch_batches": batches if isinstance(batches, int) else None,
                "batch_rows": [self._batch_rows(loader) for loader in loaders],
                "ranks": gathered,
            }

    def _batch_rows(self, loader: Any) -> int | None:
        """Rows of a batch over all replicas."""
        return loader.batch_size * self._strategy.topology.num_replicas if has_plain_batches(loader) else None

    # ---- going on --------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """A new run begins."""
        self._saved, self._num_loaders = None, 0
        self._generators.clear()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take over what a checkpoint holds for this rank, before Lightning restores the rest."""
        self._saved = checkpoint.get(ENTRY)
        if self._saved is None:
            return
        loops = checkpoint["loops"]["fit_loop"]["state_dict"]
        if "combined_loader" not in loops:
            return
        if self._saved["replicas"] == self._strategy.topology.num_replicas:
            loops["combined_loader"] = self._of_replica("loader_states")
        else:
            rank_zero_warn(
                f"The checkpoint was written with {self._saved['replicas']} replicas. Data loaders with a state_dict "
                "of their own get the state of the first one's in all of them."
            )

    def restore(self) -> None:
        """Set the random states, once the loaders' iterators exist; they have drawn from them."""
        if self._saved is not None and self._place is not None and self._place.state != "begins":
            self._set_random_states()
        self._saved = None

    def _set_random_states(self) -> None:
        saved, strategy = self._saved, self._strategy
        assert saved is not None
        topology = strategy.topology
        if (saved["stages"], saved["replicas"]) == (topology.num_stages, topology.num_replicas):
            own = saved["ranks"][topology.rank]
            set_random_state(own["random"], strategy.root_device)
            assert strategy._pipeline is not None
            strategy._pipeline.random_state = own["step"]
        else:
            # Streams of other stages' dropout are of no use here; what all stages draw alike is.
            set_random_state(self._of_replica("random"))
        for generator, state in self._generators:
            generator.set_state(state)

    def _of_replica(self, key: str) -> Any:
        """What the first stage of this replica has saved; of the first replica, when their number has changed."""
        saved, topology = self._saved, self._strategy.topology
        assert saved is not None
        replica = topology.replica if saved["replicas"] == topology.num_replicas else 0
        return saved["ranks"][replica * saved["stages"]][key]

    # ---- loaders ---------------------------------------------------------------------------------------------------

    @property
    def _trainer(self) -> pl.Trainer:
        module = self._strategy.lightning_module
        assert module is not None
        return module.trainer

    def follow(self, loader: Any) -> Any:
        """Make ready a loader that Lightning is about to use; called on all ranks alike.

        Raises:
            UnevenLoadersError: on every rank alike, when the ranks' loaders have different lengths.
        """
        trainer = self._trainer
        assert trainer.state.stage is not None
        prefix = trainer.state.stage.dataloader_prefix
        kind, given = f"{prefix}_dataloader", getattr(trainer, f"limit_{prefix}_batches")
        limit = given if isinstance(given, int) else float("inf")
        meeting = self._meeting(loader, kind, limit) if trainer.world_size > 1 else None
        follower = None
        if trainer.training:
            self._place = loop_place(trainer, None if self._saved is None else self._saved["epoch_batches"])
            resumption = self._resumption(loader)
            # Loaders with workers take their first rows before Lightning says which epoch it is.
            if callable(set_epoch := getattr(getattr(loader, "sampler", None), "set_epoch", None)):
                set_epoch(self._place.epoch)
            if not isinstance(loader, _Stateful):
                follower = Follower(loader, resumption)
                if has_plain_batches(loader):
                    loader.batch_sampler.sampler = FollowedSampler(loader, follower)
                    return loader
        if follower is None and meeting is None:
            return loader
        wrapper = FollowedStatefulLoader if isinstance(loader, _Stateful) else FollowedLoader
        return wrapper(loader, follower, meeting, limit)

    def _meeting(self, loader: object, kind: str, limit: float) -> Meeting | None:
        group, length = self._strategy._process_groups.everyone, sized_len(loader)
        check_same_length(kind, None if length is None else min(length, limit), group)
        if isinstance(loader, Sequence) or (isinstance(loader, DataLoader) and not has_iterable_dataset(loader)):
            return None

        def meet(batch: int, ended: bool) -> None:
            self._strategy.position.enter(f"waiting for all processes to have batch {batch} of their {kind}")
            check_same_progress(kind, batch, ended, group)
            self._strategy.position.leave()

        return meet

    def _resumption(self, loader: Any) -> Resumption | None:
        """How the training loader that comes next goes on; random states are set where its iterator draws from them."""
        index, self._num_loaders = self._num_loaders, self._num_loaders + 1
        saved, place = self._saved, self._place
        if saved is None or place is None:
            return None
        starts, generators = self._of_replica("starts"), self._of_replica("generators")
        if index >= len(starts):
            return None
        if (state := generators[index]) is not None and getattr(loader, "generator", None) is not None:
            self._generators.append((loader.generator, state))
        self._set_random_states()
        if place.state != "within" or starts[index] is None:
            return None
        # Lightning cannot know that it goes on where it was.
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable")
        self._check_position(saved, index, loader)
        start = EpochStart(**starts[index])
        batches = sized_len(loader)
        # A loader that is shorter than another one beside it has begun anew before the epoch's end.
        consumed = place.consumed if not batches else place.consumed - max(0, place.consumed - 1) // batches * batches
        return Resumption(start, consumed, self._rows(loader, start.order, place.epoch))

    def _rows(self, loader: Any, order: str | int | None, epoch: int) -> Iterable[int] | None:
        """The rows of this replica in the order that the epoch began with; None where the loader has it by itself.

        With one replica the user's sampler shuffles, with several Lightning's.
        """
        here, topology = order_of(loader), self._strategy.topology
        if order is None or here is None or order == here:
            return None
        return rows_in_order(loader, order, epoch, topology.num_replicas, topology.replica)

    def _check_position(self, saved: dict[str, Any], index: int, loader: object) -> None:
        rows, here = saved["batch_rows"][index], self._batch_rows(loader)
        if rows is not None and here is not None and rows != here:
            rank_zero_warn(
                f"A batch over all replicas had {rows} rows when the checkpoint was written, and has {here} now. The "
                "epoch goes on behind as many batches, not rows: some rows come twice in it, or not at all. Change "
                "batch_size with the number of replicas, so that their product stays the same."
            )
        elif rows is None and saved["replicas"] != self._strategy.topology.num_replicas:
            rank_zero_warn(
                f"The checkpoint was written with {saved['replicas']} replicas. What their data loaders would give "
                "next cannot be shared out anew: the epoch goes on behind as many batches of the loaders that are "
                "here."
            )


def _start(loader: object) -> dict[str, Any] | None:
    follower = follower_of(loader)
    return None if follower is None or follower.start is None else vars(follower.start)


def _generator_state(loader: object) -> torch.Tensor | None:
    generator: torch.Generator | None = getattr(loader, "generator", None)
    return None if generator is None else generator.get_state()
