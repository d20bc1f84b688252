"""Checkpoints of a cut module: written as one device writes them, read by whatever part of it is here."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_seq1f1b.runtime.together import Failure
from lightning_seq1f1b.strategy.cut_module import CutModule
from lightning_seq1f1b.strategy.gathering import gather_to_first
from lightning_seq1f1b.strategy.loading import reading_own_part
from lightning_seq1f1b.strategy.optimizers import WholeGroup, check_groups, local_state, whole_state
from lightning_seq1f1b.strategy.processes import PipelineProcesses
from lightning_seq1f1b.strategy.saving import save

if TYPE_CHECKING:
    from lightning_seq1f1b.strategy.seq1f1b import Seq1F1BStrategy


class PipelineCheckpoints(PipelineProcesses):
    """The part of a strategy that saves and loads what the module and its optimizers hold.

    Args:
        num_stages: stages of one replica; None for all processes.
        backend: of torch.distributed; None to choose by the device.
        timeout: how long a rank waits for another one.
    """

    def __init__(self, num_stages: int | None, backend: str | None, timeout: timedelta) -> None:
        super().__init__(num_stages, backend, timeout)
        self._cut: CutModule | None = None
        self._whole_groups: list[list[WholeGroup]] = []

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
        """The whole module's state dict on rank 0, on the CPU, with the keys of one device; empty elsewhere."""
        cut = self._cut
        if cut is None:
            return super().lightning_module_state_dict()
        gathered = self._gather(cut.own_state())
        return {} if gathered is None else cut.merged_state(gathered)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a whole state dict: into the whole module before it is cut, else this rank's part of it."""
        if self._cut is None or not self._cut.is_of(self.lightning_module):
            with warnings.catch_warnings():
                # What other stages hold is on the meta device, where nothing is copied to.
                warnings.filterwarnings("ignore", message=".*to a meta parameter in the current model.*")
                super().load_model_state_dict(checkpoint, strict)
        else:
            self._cut.load_state(checkpoint["state_dict"], strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state over the whole model on rank 0, as one device saves it; empty elsewhere."""
        assert self._cut is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        place = next(index for index, own in enumerate(self.optimizers) if own is optimizer)
        check_groups(optimizer, self._whole_groups[place])
        entries = {
            (name, key): value
            for name, parameter in self._cut.counted_names().items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        gathered = self._gather(entries)
        if gathered is None:
            return {}
        by_name: dict[str, dict[str, Any]] = {}
        for (name, key), value in gathered.items():
            by_name.setdefault(name, {})[key] = value
        return whole_state(optimizer, self._whole_groups[place], by_name)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore this rank's part of the saved optimizers."""
        assert self._cut is not None
        local = dict(self._cut.module.named_parameters())
        states = checkpoint["optimizer_states"]
        for optimizer, saved, whole in zip(self.optimizers, states, self._whole_groups, strict=True):
            optimizer.load_state_dict(local_state(saved, whole, local))

    def _check_together(self) -> None:
        if self._broken:
            raise RuntimeError("nothing can be saved after a failed step: the ranks stand at different places")

    def _gather(self, values: dict[Any, Any]) -> dict[Any, Any] | None:
        """The first replica's entries on rank 0; None elsewhere."""
        self._check_together()
        if self.topology.replica > 0:
            return None
        return gather_to_first(values, self._process_groups.control, self.topology.pipeline_ranks)
