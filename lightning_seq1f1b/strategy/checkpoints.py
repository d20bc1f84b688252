"""Checkpoints of a cut module: written as one device writes them, read by whatever part of it is here."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_seq1f1b.runtime.together import Failure, failing_together
from lightning_seq1f1b.strategy.gathering import gather_to_first
from lightning_seq1f1b.strategy.loading import reading_own_part
from lightning_seq1f1b.strategy.optimizers import (
    WholeGroup,
    check_groups,
    copy_state,
    local_state,
    named_groups,
    whole_state,
)
from lightning_seq1f1b.strategy.saving import save
from lightning_seq1f1b.strategy.sharded_reading import SavedEntries, SavedState, ShardedCheckpoint
from lightning_seq1f1b.strategy.storage import PipelineStorage

if TYPE_CHECKING:
    from lightning_seq1f1b.strategy.seq1f1b import Seq1F1BStrategy


class PipelineCheckpoints(PipelineStorage):
    """The part of a strategy that saves and loads what the module and its optimizers hold.

    Args:
        num_stages: stages of one replica; None for all processes.
        backend: of torch.distributed; None to choose by the device.
        timeout: how long a rank waits for another one.
    """

    def __init__(self, num_stages: int | None, backend: str | None, timeout: timedelta) -> None:
        super().__init__(num_stages, backend, timeout)
        self._whole_groups: list[list[WholeGroup]] = []
        self._to_load: tuple[ShardedCheckpoint, bool] | None = None
        self._owners: Mapping[str, int] = {}  # replicas by parameter names; empty where all hold all

    def _owned_names(self) -> Collection[str]:
        """Names of the local parameters whose optimizer state this rank holds: its share of them, or all."""
        assert self._cut is not None
        names = [name for name, _ in self._cut.module.named_parameters()]
        return {name for name in names if not self._owners or self._owners[name] == self.topology.replica}

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`: models are loaded without what other ranks' stages need; see `loading`."""
        with reading_own_part(cast("Seq1F1BStrategy", self)):
            yield

    @override
    def teardown(self) -> None:
        """End a run. A module that failed before it was cut has no values to move to the CPU."""
        module = self._lightning_module
        if module is not None and any(parameter.is_meta for parameter in module.parameters()):
            self._lightning_module = None  # or Lightning moves it, and its error hides the first one
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    # ---- the model -------------------------------------------------------------------------------------------------

    def save_pretrained(
        self, directory: str | Path, max_shard_size: int | str = "5GB", tokenizer: Any | None = None
    ) -> None:
        """Write the model as a directory for `from_pretrained`: weights in safetensors, configs, tokenizer.

        To be called on all ranks once the model has been cut: in a hook or callback of a run, or after it. Every rank
        of the first replica writes its own weights, so that none needs memory for more; on several nodes the directory
        must be on a file system that they share. Of a model with adapters only these are written, in peft's format. The
        directory appears under its name once all is in it.

        Args:
            directory: new, or empty.
            max_shard_size: bytes of a file of weights at most, as a number or like "5GB"; every rank begins a new file.
            tokenizer: a tokenizer, or the path or name of one; that of the data module by default, if it has one.

        Raises:
            OSError: on all ranks, when one cannot write, with its reason. Nothing is left of the directory then.
            ValueError: when there is something in the directory, or before the model has been cut.
        """
        cut = self._cut
        if cut is None or not cut.is_of(self.lightning_module):
            raise ValueError("there is no model on stages to save yet: call save_pretrained in a run or after it")
        self._check_together()
        if tokenizer is None:
            datamodule: Any = cut.module.trainer.datamodule  # type: ignore[attr-defined]  # not declared
            tokenizer = getattr(datamodule, "tokenizer", None)
        job: str = self.broadcast(uuid.uuid4().hex[:8])
        error: Exception | None = None
        try:
            if self.topology.replica == 0:
                options = {"max_shard_size": max_shard_size, "tokenizer": tokenizer}
                save(cut, Path(directory), job, self._gather, self._process_groups.control, **options)
        except Exception as raised:
            error = raised
        failure: Failure | None = self.broadcast(None if error is None else Failure.of(error))
        if error is not None:
            raise error
        if failure is not None:
            raise failure.error("saving the model failed on the first replica")

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's state dict on rank 0, on the CPU, with the keys of one device; empty elsewhere.

        With `state_dict_type="sharded"`, on every rank what is here, where it is.
        """
        cut = self._cut
        if cut is None:
            return super().lightning_module_state_dict()
        if self.state_dict_type == "sharded":
            self._check_together()
            return cut.own_state()
        gathered = self._gather(cut.own_state())
        return {} if gathered is None else cut.merged_state(gathered)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a whole state dict: into the whole module before it is cut, else this rank's part of it.

        Of a sharded checkpoint only this rank's part is read, as soon as the module is cut.
        """
        state = checkpoint["state_dict"]
        if isinstance(state, SavedState):
            self._to_load = state.checkpoint, strict
            if self._cut is not None and self._cut.is_of(self.lightning_module):
                self._load_own_part()
        elif self._cut is None or not self._cut.is_of(self.lightning_module):
            with warnings.catch_warnings():
                # What other stages hold is on the meta device, where nothing is copied to.
                warnings.filterwarnings("ignore", message=".*to a meta parameter in the current model.*")
                super().load_model_state_dict(checkpoint, strict)
        else:
            self._cut.load_state(state, strict=strict)

    def _load_own_part(self) -> None:
        """Read the weights of a sharded checkpoint that has been opened, if one has."""
        if self._to_load is None:
            return
        (saved, strict), self._to_load = self._to_load, None
        assert self._cut is not None
        self._cut.check(saved.shapes, strict=strict)
        state = self._cut.module.state_dict()
        with failing_together(self._process_groups.everyone, f"loading {saved.path}", "rank"):
            state.update(saved.fill(state))
        self._cut.module.load_state_dict(state, strict=False)  # for what modules do when they are loaded

    # ---- optimizers ------------------------------------------------------------------------------------------------

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state over the whole model on rank 0, as one device saves it; empty elsewhere.

        With `state_dict_type="sharded"`, on every rank the state that is here, by parameter name.
        """
        assert self._cut is not None
        self._check_together()
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        place = next(index for index, own in enumerate(self.optimizers) if own is optimizer)
        whole = self._whole_groups[place]
        check_groups(optimizer, whole)
        owned = self._owned_names()
        counted = {name: p for name, p in self._cut.counted_names().items() if name in owned}
        if self.state_dict_type == "sharded":
            here = {name: optimizer.state[p] for name, p in counted.items() if p in optimizer.state}
            return {"state": here, "param_groups": named_groups(optimizer, whole)}
        entries = {
            (name, key): value
            for name, parameter in counted.items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        gathered = self._gather(entries, apart=bool(self._owners))
        if gathered is None:
            return {}
        by_name: dict[str, dict[str, Any]] = {}
        for (name, key), value in gathered.items():
            by_name.setdefault(name, {})[key] = value
        return whole_state(optimizer, whole, by_name)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore this rank's part of the saved optimizers."""
        assert self._cut is not None
        local = dict(self._cut.module.named_parameters())
        states = checkpoint["optimizer_states"]
        with failing_together(self._process_groups.everyone, "loading the optimizer's state", "rank"):
            for optimizer, saved, whole in zip(self.optimizers, states, self._whole_groups, strict=True):
                optimizer.load_state_dict(local_state(saved, whole, local, self._owned_names()))
                if not isinstance(saved["state"], SavedEntries):
                    copy_state(optimizer)

    def _gather(self, values: dict[Any, Any], *, apart: bool = False) -> dict[Any, Any] | None:
        """The entries of the first replica's ranks, or where replicas hold them apart of all ranks, on rank 0."""
        self._check_together()
        groups, topology = self._process_groups, self.topology
        if apart:
            return gather_to_first(values, groups.everyone, range(topology.world_size))
        return gather_to_first(values, groups.control, topology.pipeline_ranks) if topology.replica == 0 else None
