"""A LightningModule of which this rank holds one stage, seen once as what is here and once as the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_seq1f1b.models.find import find_causal_lm
from lightning_seq1f1b.models.shape import model_shape
from lightning_seq1f1b.models.split import cut
from lightning_seq1f1b.models.stage import HuggingFaceStage
from lightning_seq1f1b.models.whole_only import refuse_methods_of_the_whole
from lightning_seq1f1b.runtime.topology import Topology
from lightning_seq1f1b.schedule.costs import layers_per_stage

BALANCE_LENGTH = 4096
"""Tokens of the row for which layers are balanced over the stages: long enough for attention to count."""

_CUT = "_seq1f1b_cut"
"""The attribute of a cut model where a later Trainer finds how it was cut."""


@dataclass(frozen=True)
class SameAs:
    """Stands for a tensor that another name in the state dict holds already."""

    name: str


class CutModule:
    """Cuts the module's language model in place and keeps what is known of the whole.

    Args:
        module: whole, on the CPU; its one Hugging Face causal language model is cut.
        topology: which stage this rank holds.

    Raises:
        ValueError: when the module holds no causal language model, or one that cannot be cut.
    """

    def __init__(self, module: pl.LightningModule, topology: Topology) -> None:
        self.module, self.topology = module, topology
        self.name, self.model = find_causal_lm(module)
        self.shape = model_shape(self.model.config)
        self.layer_ranges = _ranges(layers_per_stage(self.shape, topology.num_stages, BALANCE_LENGTH))
        # Optimizers may have been made before this, from parameters that are cut off now.
        self.uncut_names = {parameter: name for name, parameter in module.named_parameters()}
        self.split = cut(self.model, topology.pipeline_rank, self.layer_ranges)
        self.stage = HuggingFaceStage(self.split)
        if topology.num_stages > 1:
            refuse_methods_of_the_whole(module.modules())
        with self.whole():
            self.shapes = {
                key: tuple(value.shape) if isinstance(value, Tensor) else None
                for key, value in module.state_dict().items()
            }

    @classmethod
    def of(cls, module: pl.LightningModule, topology: Topology) -> CutModule:
        """The module's cut: made now, or by an earlier Trainer of this program.

        Raises:
            ValueError: when it was cut into another number of stages.
        """
        _, model = find_causal_lm(module)
        earlier: CutModule | None = getattr(model, _CUT, None)
        if earlier is None or earlier.module is not module:
            earlier = cls(module, topology)
            setattr(model, _CUT, earlier)
        elif earlier.topology != topology:
            raise ValueError(
                f"this {type(model).__name__} has been cut into {earlier.topology.num_stages} stage(s) by an earlier "
                f"Trainer and cannot be cut into {topology.num_stages}: give the Trainer a new module, and "
                "load a checkpoint into it"
            )
        return earlier

    def is_of(self, module: pl.LightningModule | None) -> bool:
        """Whether this is still the cut of the module: it may have been given a new, whole model since."""
        return module is self.module and find_causal_lm(module)[1] is self.model

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the module has every module and parameter of the whole; foreign ones are on the meta device."""
        with self.split.whole():
            yield

    @property
    def tied(self) -> list[nn.Parameter]:
        """Parameters of the language model that the first and the last stage both hold; empty elsewhere."""
        return [self.model.get_parameter(name) for name in self._tied_names]

    @property
    def _tied_names(self) -> tuple[str, ...]:
        return self.split.tied if self.split.is_first or self.split.is_last else ()

    @property
    def outside(self) -> list[nn.Parameter]:
        """The user's parameters outside the language model; every stage holds them."""
        inside = set(self.model.parameters())
        return [parameter for parameter in self.module.parameters() if parameter not in inside]

    def counted_names(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank counts, by name."""
        elsewhere = set() if self.topology.pipeline_rank == 0 else {*self.tied, *self.outside}
        return {name: p for name, p in self.module.named_parameters() if p not in elsewhere}

    # ---- state -----------------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """The rank's own entries of the whole state dict; together the ranks have every key once."""
        state = self.module.state_dict()
        if self.topology.pipeline_rank == 0:
            return state
        prefix = f"{self.name}."
        first_holds = {self.model.get_parameter(name).data_ptr(): f"{prefix}{name}" for name in self._tied_names}
        own: dict[str, Any] = {}
        for key, value in state.items():
            if not key.startswith(prefix):
                continue
            source = first_holds.get(value.data_ptr()) if isinstance(value, Tensor) else None
            if source is None:
                own[key] = value
            elif key != source:
                own[key] = SameAs(source)
        return own

    def merged_state(self, gathered: Mapping[str, Any]) -> dict[str, Any]:
        """All ranks' entries as the whole module's state dict, in its order, with shared tensors shared."""
        resolved = {
            key: gathered[value.name] if isinstance(value, SameAs) else value for key, value in gathered.items()
        }
        return {key: resolved[key] for key in self.shapes}

    def load_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load this rank's part of a whole state dict.

        Raises:
            RuntimeError: on every rank alike, for keys that are missing or unexpected when `strict`, and for shapes
                that differ; all are listed.
        """
        problems = []
        if strict:
            problems += [f"missing key: {key}" for key in self.shapes if key not in state]
            problems += [f"unexpected key: {key}" for key in state if key not in self.shapes]
        for key, shape in self.shapes.items():
            if shape is not None and key in state and tuple(state[key].shape) != shape:
                problems.append(f"size mismatch for {key}: {tuple(state[key].shape)} saved, {shape} here")
        if problems:
            raise RuntimeError(f"the checkpoint does not fit {type(self.module).__name__}:\n  " + "\n  ".join(problems))
        own = self.module.state_dict().keys()
        self.module.load_state_dict({key: value for key, value in state.items() if key in own}, strict=False)


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    bounds = [sum(counts[:index]) for index in range(len(counts) + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def loss_dtype(model: nn.Module) -> torch.dtype:
    """float32, or float64 for a double-precision model."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return torch.float64 if torch.float64 in dtypes else torch.float32
