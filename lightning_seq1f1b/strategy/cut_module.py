"""A LightningModule of which this rank holds some stages, seen once as what is here and once as the whole."""

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
from lightning_seq1f1b.models.stage import make_stages
from lightning_seq1f1b.models.whole_only import refuse_saving
from lightning_seq1f1b.runtime.topology import Topology
from lightning_seq1f1b.schedule.balance import balanced_layers
from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.strategy.adapters import check_adapters

_CUT = "_seq1f1b_cut"
"""The attribute of a cut model where a later Trainer finds how it was cut."""


@dataclass(frozen=True)
class LoadedPart:
    """What a rank has read of a model that was loaded for stages; the rest of it is on the meta device.

    Attributes:
        topology: where the rank stood.
        virtual_stages: stages on each rank.
        layers: layers of every stage.
    """

    topology: Topology
    virtual_stages: int
    layers: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module) -> LoadedPart | None:
        """What was read of a model; None for one with all its values."""
        return getattr(model, "_seq1f1b_part", None)

    def mark(self, model: nn.Module) -> None:
        """Note on the model that only this part of it has values."""
        model._seq1f1b_part = self  # type: ignore[assignment]  # typed as a module or tensor

    def unmark(self, model: nn.Module) -> None:
        """Note on the model that all of it has values."""
        del model._seq1f1b_part

    def check(self, model: nn.Module, topology: Topology, virtual_stages: int, layers: tuple[int, ...]) -> None:
        """Raise ValueError when the model is to be cut into other stages."""
        if self != LoadedPart(topology, virtual_stages, layers):
            before, now = _counted(self.topology, self.virtual_stages), _counted(topology, virtual_stages)
            raise ValueError(
                f"this {type(model).__name__} was loaded for {before} with {list(self.layers)} layers and cannot be "
                f"cut into {now} with {list(layers)}: load it again, in the configure_model of a new module"
            )


@dataclass(frozen=True)
class SameAs:
    """Stands for a tensor that another name in the state dict holds already."""

    name: str


class CutModule:
    """Cuts the module's language model in place and keeps what is known of the whole.

    Args:
        module: whole, on the CPU; its one Hugging Face causal language model is cut.
        topology: where this rank stands in its pipeline.
        virtual_stages: stages on each rank: of p ranks, rank r holds stages r, r + p, r + 2 p and so on.
        layers: layers of every stage; None to balance them.

    Raises:
        ValueError: when the module holds no causal language model, or one that cannot be cut, has fewer layers than
            there are stages, or has adapters that would not be trained as on one device.
    """

    def __init__(
        self, module: pl.LightningModule, topology: Topology, virtual_stages: int, layers: Sequence[int] | None = None
    ) -> None:
        self.module, self.topology, self.virtual_stages = module, topology, virtual_stages
        self.name, self.model = find_causal_lm(module)
        check_adapters(module, self.model)
        self.shape = model_shape(self.model.config)
        num_ranks = topology.num_stages
        self.layer_ranges = layer_ranges(self.shape, num_ranks, virtual_stages, layers)
        if (loaded := LoadedPart.of(self.model)) is not None:
            loaded.check(self.model, topology, virtual_stages, self.layers)
        # Optimizers may have been made before this, from parameters that are cut off now.
        self.uncut_names = {parameter: name for name, parameter in module.named_parameters()}
        self.split = cut(self.model, stages_of(topology, virtual_stages), self.layer_ranges)
        _check_values(module)
        self.stages = make_stages(self.split)
        if num_ranks > 1:
            refuse_saving(module.modules())
        with self.whole():
            self.shapes = {
                key: tuple(value.shape) if isinstance(value, Tensor) else None
                for key, value in module.state_dict().items()
            }

    @classmethod
    def earlier(cls, module: pl.LightningModule) -> CutModule | None:
        """The module's cut by an earlier Trainer of this program; None for a whole one."""
        _, model = find_causal_lm(module)
        earlier: CutModule | None = getattr(model, _CUT, None)
        return earlier if earlier is not None and earlier.module is module else None

    @classmethod
    def of(
        cls, module: pl.LightningModule, topology: Topology, virtual_stages: int, layers: Sequence[int] | None = None
    ) -> CutModule:
        """The module's cut: made now, or by an earlier Trainer of this program.

        Raises:
            ValueError: when it was cut into other stages.
        """
        earlier = cls.earlier(module)
        if earlier is None:
            earlier = cls(module, topology, virtual_stages, layers)
            setattr(earlier.model, _CUT, earlier)
            return earlier
        other = (topology, virtual_stages, layers and tuple(layers))
        if (earlier.topology, earlier.virtual_stages, layers and earlier.layers) != other:
            before = _counted(earlier.topology, earlier.virtual_stages)
            raise ValueError(
                f"this {type(earlier.model).__name__} has been cut into {before} by an earlier Trainer and cannot be "
                f"cut into {_counted(topology, virtual_stages)}: give the Trainer a new module, and load a checkpoint "
                "into it"
            )
        return earlier

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of every stage."""
        return tuple(map(len, self.layer_ranges))

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
        """Parameters that the ranks of the first and of the last stage both hold; empty on other ranks."""
        return [self.model.get_parameter(name) for name in self._tied_names]

    @property
    def _tied_names(self) -> tuple[str, ...]:
        return self.split.tied if self.split.holds_first or self.split.holds_last else ()

    @property
    def outside(self) -> list[nn.Parameter]:
        """The user's parameters outside the language model; every rank holds them."""
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

    def check(self, saved: Mapping[str, tuple[int, ...] | None], *, strict: bool) -> None:
        """Raise RuntimeError, on every rank alike, when a saved state dict does not fit the whole module's.

        Args:
            saved: shape of every entry; None for what is no tensor.
            strict: whether keys may be missing or surplus; all that are wrong are listed.
        """
        problems = []
        if strict:
            problems += [f"missing key: {key}" for key in self.shapes if key not in saved]
            problems += [f"unexpected key: {key}" for key in saved if key not in self.shapes]
        for key, shape in self.shapes.items():
            if shape is not None and key in saved and saved[key] != shape:
                problems.append(f"size mismatch for {key}: {saved[key]} saved, {shape} here")
        if problems:
            raise RuntimeError(f"the checkpoint does not fit {type(self.module).__name__}:\n  " + "\n  ".join(problems))

    def load_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load this rank's part of a whole state dict.

        Raises:
            RuntimeError: as `check`.
        """
        shapes = {key: tuple(value.shape) if isinstance(value, Tensor) else None for key, value in state.items()}
        self.check(shapes, strict=strict)
        own = self.module.state_dict().keys()
        self.module.load_state_dict({key: value for key, value in state.items() if key in own}, strict=False)


def _counted(topology: Topology, virtual_stages: int) -> str:
    stages = f"{topology.num_stages} stage(s)"
    return stages if virtual_stages == 1 else f"{topology.num_stages} x {virtual_stages} stage(s)"


def layer_ranges(
    shape: ModelShape, num_ranks: int, virtual_stages: int, layers: Sequence[int] | None
) -> tuple[range, ...]:
    """The indices of the layers of every stage.

    Args:
        shape: of the model.
        num_ranks: pipeline ranks.
        virtual_stages: stages on each of them.
        layers: layers of every stage; None to balance them.

    Raises:
        ValueError: for layers that do not add up, or less layers than stages.
    """
    num_stages = num_ranks * virtual_stages
    if layers is not None and (len(layers) != num_stages or sum(layers) != shape.num_layers):
        raise ValueError(
            f"layers lists {len(layers)} stages with {sum(layers)} layers, but the model has {shape.num_layers} layers "
            f"for {num_ranks} ranks x {virtual_stages} virtual stages"
        )
    return _ranges(layers or balanced_layers(shape, num_ranks, virtual_stages))


def stages_of(topology: Topology, virtual_stages: int) -> range:
    """The stages of this rank, of those dealt out in turn."""
    return range(topology.pipeline_rank, topology.num_stages * virtual_stages, topology.num_stages)


def _check_values(module: nn.Module) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise ValueError(
            f"{len(empty)} tensors of this rank's stages have no values, they are on the meta device: "
            f"{', '.join(empty)}. Load the model with from_pretrained in configure_model, or make it on the CPU"
        )


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    bounds = [sum(counts[:index]) for index in range(len(counts) + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def loss_dtype(model: nn.Module) -> torch.dtype:
    """float32, or float64 for a double-precision model."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return torch.float64 if torch.float64 in dtypes else torch.float32
