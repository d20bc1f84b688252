"""`Seq1F1BStrategy`: what a user passes to the Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torchmetrics import Metric
from typing_extensions import override

from lightning_seq1f1b.models import facade, generation
from lightning_seq1f1b.models.packing import PackedRows
from lightning_seq1f1b.runtime.gradients import pipeline_norm
from lightning_seq1f1b.runtime.pipeline import Pipeline
from lightning_seq1f1b.runtime.trace import StepTrace
from lightning_seq1f1b.schedule.planner import Problem
from lightning_seq1f1b.schedule.timeline import Event
from lightning_seq1f1b.strategy.arguments import check_arguments, check_state_dict_type
from lightning_seq1f1b.strategy.as_asked import cut_as_asked, cutting_of, multiple_on
from lightning_seq1f1b.strategy.clipping import clip_over_stages
from lightning_seq1f1b.strategy.cut_module import CutModule, loss_dtype
from lightning_seq1f1b.strategy.data import PipelineData
from lightning_seq1f1b.strategy.first_batch import announcer
from lightning_seq1f1b.strategy.loss_scale import share_loss_scale
from lightning_seq1f1b.strategy.optimizer_sharding import SharedSteps, share_out
from lightning_seq1f1b.strategy.optimizers import keep_local
from lightning_seq1f1b.strategy.report import describe, show_whole_model
from lightning_seq1f1b.strategy.router_sharing import share_router_sums
from lightning_seq1f1b.strategy.supported import (
    check_optimizer,
    check_precision,
    check_trainer,
)
from lightning_seq1f1b.strategy.tracing import gather_events

DEFAULT_TIMEOUT = timedelta(minutes=30)


class Seq1F1BStrategy(PipelineData):
    """Trains a Hugging Face causal language model over pipeline stages, its sequences cut into chunks.

    The module stays an ordinary LightningModule: `self.model(**batch).loss` runs the whole pipelined step and is the
    real loss on every rank, and losses, gradients and weights equal those of one device.

    Args:
        num_stages: pipeline ranks of one replica; it must divide devices x num_nodes, and the quotient is the number
            of data-parallel replicas. All devices by default.
        num_microbatches: pieces of a batch along its rows; a batch with fewer rows has one piece for each. "auto" is
            one row each.
        num_chunks: pieces of every row along the sequence. More chunks shrink the bubble and the activations in flight;
            below about a thousand tokens each, kernels lose efficiency. "auto" chooses by the row's length.
        schedule: "seq1f1b" (one forward, one backward on chunks), "interleaved_seq1f1b" (the same with
            `virtual_stages`: a smaller bubble for more messages), "seq1f1b_zb" and "interleaved_seq1f1b_zb" (weight
            gradients are computed apart and fill the bubble), "gpipe" (all forwards, then all backwards), or, on whole
            rows (`num_chunks` must be 1), "1f1b", "interleaved_1f1b" and "zb1p". "auto" lets the planner choose, for
            every shape of batch, what is fastest in the devices' memory; what you set otherwise it keeps.
        virtual_stages: stages that each rank holds, dealt out in turn; for the interleaved schedules. Each needs a
            layer, and the bubble shrinks by their number. "auto" is 1, or with schedule "auto" the planner's choice,
            for the data module's `sequence_length`; without that for 4096 tokens.
        memory_knob: extra forwards a rank takes at the start for each rank behind it. More fill the bubble where links
            are slow or weight gradients small, and hold more activations. By the schedule by default.
        activation_cap: most chunks whose activations a rank may hold at once, counted over its virtual stages. By the
            schedule by default.
        partition: "balanced" gives every chunk the same work, "even" the same number of tokens, a number from 0 (even)
            to 1 (balanced) something in between; a list gives the chunks' lengths in tokens, which must add up to
            every row's.
        layers: layers of every stage, in order. By the cost of layers and LM head by default.
        profile: a file of `lightning-seq1f1b profile`, whose times schedule "auto" plans with.
        broadcast_batch: let the first stage hand its batch to the others, for datasets that differ between processes.
            Otherwise every process loads the same data, which is checked for every batch.
        trace: time every forward and backward; see `last_step` and `gather_trace`. It never waits for an accelerator;
            reading the times does.
        evaluation_logits: in validation, test and prediction, give `outputs.logits` [rows, length, vocabulary] on every
            rank, which each must have the memory for; batches then need no labels.
        state_dict_type: of the checkpoints that are written: "full", one file with the keys of one device, gathered on
            rank 0, or "sharded", a directory that every rank writes its own part to. Both are loaded, at any number of
            devices.
        shard_optimizer: let each data-parallel replica hold the optimizer's state for its share of the parameters only
            and step these for all replicas; the weights come out the same.
        check_finite: end the run, before any weight changes, when an activation, loss or gradient of some stage is NaN
            or infinite, and name the stage, the unit and the action that made it. With a loss scale (16-mixed)
            gradients are left out.
        process_group_backend: "nccl", "gloo" or another; chosen by the device by default.
        timeout: how long a rank waits for another one; then where every rank stands is told, and all end.

    Raises:
        ValueError: for arguments that cannot work, before any process is started where that can be known.
    """

    strategy_name = "seq1f1b"

    def __init__(
        self,
        num_stages: int | None = None,
        num_microbatches: int | Literal["auto"] = "auto",
        num_chunks: int | Literal["auto"] = "auto",
        schedule: str = "seq1f1b",
        virtual_stages: int | Literal["auto"] = "auto",
        memory_knob: int | None = None,
        activation_cap: int | None = None,
        partition: float | list[int] | str = "balanced",
        layers: list[int] | None = None,
        profile: str | None = None,
        broadcast_batch: bool = False,
        trace: bool = False,
        evaluation_logits: bool = False,
        shard_optimizer: bool = False,
        state_dict_type: Literal["full", "sharded"] = "full",
        check_finite: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(num_stages, process_group_backend, timeout, trace)
        knobs = (virtual_stages, memory_knob, activation_cap, layers, profile)
        check_arguments(num_stages, num_microbatches, num_chunks, schedule, partition, *knobs)
        self.num_microbatches, self.num_chunks = num_microbatches, num_chunks
        self.schedule, self.partition = schedule, partition
        self.virtual_stages, self.memory_knob, self.activation_cap = virtual_stages, memory_knob, activation_cap
        self.layers, self.profile, self.check_finite = layers, profile, check_finite
        self.broadcast_batch, self.evaluation_logits = broadcast_batch, evaluation_logits
        check_state_dict_type(state_dict_type)
        self.state_dict_type = state_dict_type
        self.shard_optimizer, self._shared_steps = shard_optimizer, list[SharedSteps]()
        self._problem: Problem | None = None

    # ---- setup -----------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Cut the module to this rank's stages and prepare the step; called for every fit, validate, test, predict."""
        check_precision(self.precision_plugin)
        check_trainer(trainer, self._layer_sync)
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        self.model = self.precision_plugin.convert_module(module)
        if self._cut is None or not self._cut.is_of(module):
            self._cut, self._problem = cut_as_asked(self, trainer)
            rank_zero_info(describe(self._cut, self.schedule))
        self._load_own_part()
        self.model_to_device()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
            self._loss_checked = False
        self.setup_precision_plugin()
        share_loss_scale(self.precision_plugin)
        self._pipeline = self._make_pipeline(self._cut)
        self._agree_on_copies(self._cut)
        if fitting:
            self._pipeline.announce = announcer(self, self._cut, self.schedule)
        for metric in (m for m in module.modules() if isinstance(m, Metric)):
            metric.process_group = self._process_groups.replica
        show_whole_model(trainer)
        self.barrier()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the module shows every parameter of the whole model; those of other stages are on the meta device."""
        assert self._cut is not None
        with self._cut.whole():
            yield

    def model_to_device(self) -> None:
        """Move this rank's stages to its device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def _make_pipeline(self, cut: CutModule) -> Pipeline:
        device = self.root_device
        cutting = cutting_of(self, cut, self._problem, multiple_on(device))
        pipeline = Pipeline(
            cut.stages,
            self.topology,
            self._process_groups,
            cutting,
            cut.shape,
            cut.tied,
            cut.outside,
            loss_dtype(cut.model),
            device,
            self.position,
        )
        share_router_sums(cut, self._process_groups.pipeline)
        packed = PackedRows.of(cut.model, cut.split.probe)
        facade.install(cut.model, self._step, evaluation_logits=self.evaluation_logits, packed=packed)
        generation.install(cut.model, cut.stages, pipeline, self._fail)
        return pipeline

    def _agree_on_copies(self, cut: CutModule) -> None:
        """Make weights that several ranks hold equal, whatever each rank's program has put there."""
        groups, topology = self._process_groups, self.topology
        with torch.no_grad():
            for parameter in cut.tied:
                dist.broadcast(parameter, topology.pipeline_ranks[0], group=groups.ends)
            for parameter in cut.outside:
                dist.broadcast(parameter, topology.pipeline_ranks[0], group=groups.pipeline)
            if topology.num_replicas > 1:
                for tensor in (*cut.module.parameters(), *cut.module.buffers()):
                    dist.broadcast(tensor, topology.pipeline_rank, group=groups.replica)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Let the module make optimizers over the whole model, then keep this rank's parameters in them."""
        cut = self._cut
        assert cut is not None
        with cut.whole():
            super().setup_optimizers(trainer)
            names = {parameter: name for name, parameter in cut.module.named_parameters()}
        names = {**cut.uncut_names, **names}
        cut.uncut_names = {}
        local = dict(cut.module.named_parameters())
        sharing = self.shard_optimizer and self.topology.num_replicas > 1
        for optimizer in self.optimizers:
            check_optimizer(optimizer, self.topology.num_stages * (self.topology.num_replicas if sharing else 1))
        self._whole_groups = [keep_local(optimizer, names, local) for optimizer in self.optimizers]
        if sharing:
            self._owners = share_out(local, self.optimizers, self.topology.num_replicas)
            owners = {local[name]: replica for name, replica in self._owners.items()}
            self._shared_steps = [SharedSteps(each, owners, self._process_groups.replica) for each in self.optimizers]

    @override
    def teardown(self) -> None:
        """End a run; the user's optimizers are theirs again."""
        while self._shared_steps:
            self._shared_steps.pop().end()
        super().teardown()

    @property
    def precision_plugin(self) -> Precision:
        """The Trainer's precision plugin; clipping goes through it."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = plugin
        if plugin is not None:
            clip_over_stages(plugin, self._counted, self._norm)

    def _counted(self) -> set[nn.Parameter]:
        assert self._cut is not None
        return set(self._cut.counted_names().values())

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return pipeline_norm(gradients, self._process_groups.pipeline, self.root_device)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules are made on the CPU: the whole model need not fit one accelerator."""
        with self.precision_plugin.tensor_init_context():
            yield

    # ---- times -----------------------------------------------------------------------------------------------------

    def gather_trace(self, trace: StepTrace | None = None) -> list[Event]:
        """A step's compute actions on all pipeline ranks; call it on all of them, after a step with `trace`.

        Args:
            trace: this rank's part of the step; the last one by default.

        Returns:
            One event for each action, in seconds, see `strategy.tracing.gather_events`.
        """
        trace = trace or self.last_step
        if trace is None:
            raise ValueError("no step has been traced: pass Seq1F1BStrategy(trace=True)")
        return gather_events(trace, self._process_groups.control)
