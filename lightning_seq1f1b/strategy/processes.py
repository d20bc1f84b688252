"""The processes of a pipelined Trainer: where each one stands, how they connect, and what they reduce over whom."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_seq1f1b.runtime.position import Position
from lightning_seq1f1b.runtime.topology import Groups, Topology, connect_neighbours, make_groups
from lightning_seq1f1b.strategy.failure import GRACE_S, FailureBoard
from lightning_seq1f1b.strategy.forced_end import end_at_once, wait_or_kill
from lightning_seq1f1b.strategy.meeting import open_store
from lightning_seq1f1b.strategy.watched_run import WatchedRun

_BOARDS: list[FailureBoard] = []
"""The board of the default process group, which is global to the process; a second Trainer finds both here."""

_SLACK = timedelta(seconds=30)
"""Collectives wait so much longer than the strategy's timeout: at that, where every rank stands is told first."""

_GROUPS: dict[tuple[Any, Topology, timedelta], Groups] = {}
"""Groups made so far within a default group: a second Trainer shares their connections and threads."""


class PipelineProcesses(ParallelStrategy):
    """The part of a strategy that knows processes, and nothing of models.

    Args:
        num_stages: stages of one replica; None for all processes.
        backend: of torch.distributed; None to choose by the device.
        timeout: how long a rank waits for another one.
    """

    def __init__(self, num_stages: int | None, backend: str | None, timeout: timedelta) -> None:
        super().__init__()
        self.num_nodes = 1
        self._asked_stages, self._backend, self._timeout = num_stages, backend, timeout
        self.position = Position()
        self._groups: Groups | None = None
        self._board: FailureBoard | None = None
        self._run: WatchedRun | None = None
        self._broken = False

    def __repr__(self) -> str:
        """What the error of `pytorch_lightning.Trainer` shows, which takes no strategy of the other namespace."""
        return f"<{type(self).__name__} for lightning.pytorch.Trainer (import lightning as L)>"

    @property
    def topology(self) -> Topology:
        """The place of this process among stages and replicas."""
        world = self.num_nodes * self.num_processes
        return Topology(self.global_rank, world, world if self._asked_stages is None else self._asked_stages)

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices else 1

    @property
    @override
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def is_distributed(self) -> bool:
        """Whether data is split over processes. Stages share their data, so one replica counts as one device.

        Lightning then leaves the user's sampler alone, and rows come in the order of one device.
        """
        return self.topology.num_replicas > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Replicas, not processes, see different samples."""
        return {"num_replicas": self.topology.num_replicas, "rank": self.topology.replica}

    def set_world_ranks(self) -> None:
        """Tell the environment this process's rank; called by the Trainer."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # a function that carries the rank

    @override
    def _configure_launcher(self) -> None:
        topology = self.topology  # raises while there is only one process to see the error
        del topology
        assert self.cluster_environment is not None
        self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        """Connect the processes. Called for every fit, validate, test and predict; connects once.

        Lightning's own strategies also reset the seed here. One device does not, and neither do we: all ranks run the
        same program up to this point, and go on with the same random numbers as one device.
        """
        super().setup_environment()
        self.set_world_ranks()
        if self._groups is None:
            self._connect_processes()
        self._broken = False
        assert self._lightning_module is not None
        self._run = WatchedRun(self, self._lightning_module.trainer, self._board, self._timeout.total_seconds())
        if not self.is_distributed:
            # Lightning warns wherever torch.distributed is initialised; stages all log the same value.
            warnings.filterwarnings("ignore", message=".*It is recommended to use .*sync_dist=True.*")

    def _connect_processes(self) -> None:
        topology = self.topology
        assert self.cluster_environment is not None
        if not dist.is_initialized():
            os.environ["MASTER_ADDR"] = str(self.cluster_environment.main_address)
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            store = open_store(topology.rank, topology.world_size, self._timeout + _SLACK)
            backend = self._backend or dist.get_default_backend_for_device(self.root_device.type)
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("seq1f1b", store),
                rank=topology.rank,
                world_size=topology.world_size,
                timeout=self._timeout + _SLACK,
            )
            atexit.register(_leave)
            if topology.world_size > 1:
                address = os.environ["MASTER_ADDR"]
                _BOARDS.append(FailureBoard(store, topology.rank, topology.world_size, topology.num_stages, address))
        self._board = _BOARDS[-1] if _BOARDS else None
        key = (dist.group.WORLD, topology, self._timeout)
        if key not in _GROUPS:
            _GROUPS[key] = make_groups(topology, self._timeout + _SLACK)
            connect_neighbours(topology, _GROUPS[key], self.root_device)
        self._groups = _GROUPS[key]

    @property
    def _process_groups(self) -> Groups:
        assert self._groups is not None
        return self._groups

    # ---- collectives that Lightning asks for -----------------------------------------------------------------------

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        if dist.is_initialized() and not self._is_alone:
            ids = [self.root_device.index] if self.root_device.type == "cuda" else None
            dist.barrier(device_ids=ids)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of one rank, on all processes."""
        if not dist.is_initialized() or self._is_alone:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas (or `group`): all stages of a replica hold the same value, which counts once."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized() or self._is_alone:
            return tensor
        group = self._process_groups.replica if group is None else group
        mean = reduce_op is None or str(reduce_op).lower() in ("mean", "avg")
        op = dist.ReduceOp.SUM if mean else reduce_op
        if isinstance(op, str):
            op = getattr(dist.ReduceOp, op.upper())
        result = tensor.clone()
        dist.all_reduce(result, op=op, group=group)
        return result.copy_(result / dist.get_world_size(group)) if mean else result

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """All (or any) of the processes' decisions."""
        if self._is_alone:
            return decision
        result = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(result, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(result)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """One row for each replica, [replicas, ...], unless a group is given.

        `LightningModule.all_gather` gives the group of all processes where its user gave none.
        """
        if self._is_alone:
            return tensor[None]
        if group is None or group is dist.group.WORLD:
            group = self._process_groups.replica
        return super().all_gather(tensor, group, sync_grads)

    # ---- signals ---------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self) -> None:
        """From here on signals wait for the end of a batch."""
        if self._run is not None:
            self._run.training_starts()

    @override
    def on_train_end(self) -> None:
        """Honour a signal that came in the last batch."""
        if self._run is not None:
            self._run.training_ends()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's, unless a signal asks to stop before it."""
        if self._run is not None and self._run.signals is not None:
            self._run.signals.honour_in_validation()
        return super().validation_step(*args, **kwargs)

    # ---- the end ---------------------------------------------------------------------------------------------------

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank takes part in what callbacks do now, because this one is ending by itself."""
        return self._run is not None and self._run.is_alone

    def begin_exception(self, exception: BaseException) -> None:
        """Share the first failure with all ranks, before callbacks hear of it."""
        if self._run is not None:
            self._run.begin_exception(exception)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Go on without the other ranks, unless all of them end together."""
        if self._run is not None:
            self._run.end_exception(exception)
            if self._run.stops_together or self.topology.world_size == 1:
                self._broken = False
                return
        self._broken = True
        # A program that survives this goes on with new groups: in these, messages of the failed step may still wait.
        self._groups = None
        _GROUPS.clear()

    @override
    def teardown(self) -> None:
        """End a run; called after every fit, validate, test, predict, and after a failure of one."""
        if not self._broken:
            self.barrier()  # rank 0 hosts the store: it must not leave while another one is still at work
        run, self._run = self._run, None
        try:
            if run is not None:
                run.end(failed=self._broken or run.stops_together)
        finally:
            super().teardown()


def _leave() -> None:
    """Close the connections at the interpreter's end, while their threads can still be joined."""
    failed = [board for board in _BOARDS if board.failed]
    if failed:
        # After a failure a backend may wait for ranks that are not there any more.
        late = threading.Timer(2 * GRACE_S, end_at_once, ("the connections did not close after a failure", ()))
        late.daemon = True
        late.start()
    for board in failed:
        wait_or_kill(board.children(), GRACE_S)
    if dist.is_initialized():
        dist.destroy_process_group()
    while _BOARDS:
        _BOARDS.pop().leave()
