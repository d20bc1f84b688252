"""Cut a causal language model in place, down to some of its stages, without touching the names of what stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lightning_seq1f1b.models.probe import Probe, probe
from lightning_seq1f1b.models.stubs import ExitStub, LayerStub, PassStub, Stub
from lightning_seq1f1b.models.trunk import Trunk, find_trunk
from lightning_seq1f1b.models.without_memory import free

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class _Place:
    """A place in the model where a stub stands, or is put for a while."""

    parent: nn.Module
    name: str
    stub: Stub

    @property
    def module(self) -> nn.Module:
        """What stands there now."""
        module = self.parent._modules[self.name]
        assert module is not None
        return module

    def put(self, module: nn.Module) -> None:
        # Assigning to a name that is there keeps its place in the order of the modules.
        self.parent._modules[self.name] = module


class Split:
    """A model of which only some stages are left; made by `cut`.

    Attributes:
        model: the model that was cut.
        indices: the stages that are left, in order; 0 is the first of the model.
        num_stages: number of stages of the whole model.
        trunk: where the layers are.
        layer_ranges: for every stage of the model the indices of its layers.
        tied: names, within the model, of parameters that are on the first and on the last stage, such as tied
            embeddings; empty where these two are left together, or are one, and so share one parameter.
        probe: what is known of the model.
    """

    def __init__(
        self,
        trunk: Trunk,
        indices: Sequence[int],
        layer_ranges: Sequence[range],
        tied: tuple[str, ...],
        foreign: Sequence[_Place],
        hidden: Mapping[int, Sequence[_Place]],
        learned: Probe,
    ) -> None:
        self.model: PreTrainedModel = trunk.model
        self.indices = tuple(indices)
        self.num_stages = len(layer_ranges)
        self.trunk = trunk
        self.layer_ranges = tuple(layer_ranges)
        self.tied = tied
        self.probe = learned
        self._foreign = tuple(foreign)
        self._hidden = hidden
        self._whole = False

    @property
    def holds_first(self) -> bool:
        """Whether the stage that embeds the tokens is left."""
        return 0 in self.indices

    @property
    def holds_last(self) -> bool:
        """Whether the stage that has the head and computes the loss is left."""
        return self.num_stages - 1 in self.indices

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the modules of other stages are back, on the meta device: all names, shapes and their order show.

        What has been left is the same objects inside and outside. The model cannot run inside. What is changed on the
        modules of other stages, such as `requires_grad`, is still so the next time.
        """
        if self._whole:
            yield
            return
        for place in self._foreign:
            place.put(place.stub.original)
        self._whole = True
        try:
            yield
        finally:
            for place in self._foreign:
                place.put(place.stub)
            self._whole = False

    @contextmanager
    def only(self, index: int) -> Iterator[None]:
        """Inside, stubs hide the other stages that are left too, and the one behind this stage raises `Leaving`.

        So the model's own forward runs one stage, from whatever its first layer is given.
        """
        places = self._hidden[index]
        before = [place.module for place in places]
        # The stub at the exit comes last, over the one of a layer that is left.
        for place in places:
            place.put(place.stub)
        try:
            yield
        finally:
            for place, module in zip(places, before, strict=True):
                place.put(module)


def cut(model: PreTrainedModel, stage_indices: Sequence[int], layer_ranges: Sequence[range]) -> Split:
    """Cut a model, in place, down to some of its stages and free the memory of the rest.

    Decoder layers of other stages give way to stubs at the same indices. What runs before the layers stays with the
    first stage only, what runs after them with the last; a module whose parameters are all on a stage anyway, such as a
    tied embedding, stays there too. Modules without parameters stay everywhere.

    Args:
        model: a causal language model of transformers, also the one inside a peft model.
        stage_indices: the stages to leave, in order; 0 is the first.
        layer_ranges: for every stage the indices of its layers; together they are all layers, in order.

    Raises:
        ValueError: the model can't be cut so, or can't be run chunk by chunk at all; nothing has been changed then.
    """
    if any(isinstance(module, Stub) for module in model.modules()):
        raise ValueError(
            f"this {type(model).__name__} has been cut into stages before; make or load the whole model again to cut it"
        )
    learned = probe(model)
    trunk = find_trunk(model)
    _check_ranges(trunk, stage_indices, layer_ranges)
    if len(layer_ranges) > 1 and learned.uncuttable is not None:
        raise ValueError(
            f"{type(model).__name__} can't be cut into stages between its layers: {learned.uncuttable}. "
            "Use num_stages=1 and virtual_stages=1 for it."
        )
    pieces = tuple(_pieces(trunk, layer_ranges, learned))
    homes = _homes(model, pieces, len(layer_ranges))
    tied = _tied(model, pieces, homes, len(layer_ranges))
    foreign = [piece for piece in pieces if not any(piece.stays_on(stage, homes) for stage in stage_indices)]
    left = [piece for piece in pieces if piece not in foreign]
    free(
        [piece.module for piece in foreign],
        kept=[
            *(parameter for parameter in model.parameters() if not homes[id(parameter)].isdisjoint(stage_indices)),
            *(buffer for piece in left for buffer in piece.module.buffers()),
        ],
    )
    hidden = {
        stage: [
            *(piece.place(learned) for piece in left if not piece.stays_on(stage, homes)),
            *(_Place(trunk.layers, str(end), ExitStub(trunk.layers[end])) for end in _exits(stage, layer_ranges)),
        ]
        for stage in stage_indices
    }
    places = [piece.place(learned) for piece in foreign]
    for place in places:
        place.put(place.stub)
    # Where one rank has both ends there is one parameter, whose gradient is complete.
    apart = not {0, len(layer_ranges) - 1}.issubset(stage_indices)
    return Split(trunk, stage_indices, layer_ranges, tied if apart else (), places, hidden, learned)


@dataclass(frozen=True, eq=False)
class _Piece:
    """A module that is wholly on one stage: a decoder layer, or one beside the layers."""

    parent: nn.Module
    name: str
    full_name: str
    stage: int
    is_layer: bool

    @property
    def module(self) -> nn.Module:
        return self.parent.get_submodule(self.name)

    def stays_on(self, stage: int, homes: dict[int, set[int]]) -> bool:
        """Whether the stage keeps it: as its own, or because it takes no memory there."""
        if stage == self.stage:
            return True
        return not self.is_layer and all(stage in homes[id(parameter)] for parameter in self.module.parameters())

    def place(self, learned: Probe) -> _Place:
        stub = LayerStub(self.module, learned.layer_outputs) if self.is_layer else PassStub(self.module)
        return _Place(self.parent, self.name, stub)


def _pieces(trunk: Trunk, layer_ranges: Sequence[range], learned: Probe) -> Iterator[_Piece]:
    for parent, name, full_name in trunk.siblings():
        stage = 0 if full_name in learned.before else len(layer_ranges) - 1
        yield _Piece(parent, name, full_name, stage, is_layer=False)
    prefix = f"{trunk.name}.{trunk.attribute}" if trunk.name else trunk.attribute
    for stage, indices in enumerate(layer_ranges):
        for index in indices:
            yield _Piece(trunk.layers, str(index), f"{prefix}.{index}", stage, is_layer=True)


def _exits(stage: int, layer_ranges: Sequence[range]) -> list[int]:
    """The index of the layer behind a stage; none behind the last."""
    return [] if stage == len(layer_ranges) - 1 else [layer_ranges[stage].stop]


def _homes(model: PreTrainedModel, pieces: Sequence[_Piece], num_stages: int) -> dict[int, set[int]]:
    """The stages of every parameter, by its id; all of them for one that belongs to no piece."""
    homes: dict[int, set[int]] = {}
    for piece in pieces:
        for parameter in piece.module.parameters():
            homes.setdefault(id(parameter), set()).add(piece.stage)
    for parameter in model.parameters():
        homes.setdefault(id(parameter), set(range(num_stages)))
    ends = {0, num_stages - 1}
    for piece in pieces:
        # Adapters on a tied embedding go with it: so it has one set of names on both stages.
        held = [homes[id(parameter)] for parameter in piece.module.parameters()]
        if not piece.is_layer and ends in held:
            for stages in held:
                stages.update(ends)
    return homes


def _tied(
    model: PreTrainedModel, pieces: Sequence[_Piece], homes: dict[int, set[int]], num_stages: int
) -> tuple[str, ...]:
    """Names of the parameters on more than one stage, which must be the first and the last.

    Raises:
        ValueError: a parameter is on other stages too, or would lose its name on one of them.
    """
    ends = {0, num_stages - 1}
    tied = []
    for name, parameter in model.named_parameters():
        stages = homes[id(parameter)]
        if len(stages) == 1:
            continue
        owner = next((piece for piece in pieces if name.startswith(f"{piece.full_name}.")), None)
        if owner is None or owner.is_layer or stages != ends or not all(owner.stays_on(end, homes) for end in ends):
            raise ValueError(
                f"parameter {name} of {type(model).__name__} would be on stages {', '.join(map(str, sorted(stages)))}; "
                "only a whole embedding can be shared, and only by the first and the last stage (tied embeddings)"
            )
        tied.append(name)
    return tuple(tied)


def _check_ranges(trunk: Trunk, stage_indices: Sequence[int], layer_ranges: Sequence[range]) -> None:
    count = len(trunk.layers)
    if len(layer_ranges) > count:
        raise ValueError(
            f"{len(layer_ranges)} stages for the {count} layers of {type(trunk.model).__name__}: a stage needs a layer "
            f"at least; use {count} stages or less"
        )
    shared_out = [index for indices in layer_ranges for index in indices]
    if shared_out != list(range(count)) or not all(map(len, layer_ranges)):
        raise ValueError(
            f"layer ranges {', '.join(map(str, layer_ranges))} do not share out layers 0 to {count - 1} in order, one "
            "or more to each stage"
        )
    if not stage_indices or list(stage_indices) != sorted(set(stage_indices) & set(range(len(layer_ranges)))):
        raise ValueError(
            f"stage indices {list(stage_indices)} are not some of 0 to {len(layer_ranges) - 1}, each once and in order"
        )
