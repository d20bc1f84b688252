"""Cut a causal language model in place, down to the layers of one stage, without touching the names of what stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lightning_seq1f1b.models.probe import Probe, probe
from lightning_seq1f1b.models.stubs import LayerStub, PassStub, Stub
from lightning_seq1f1b.models.trunk import Trunk, find_trunk
from lightning_seq1f1b.models.without_memory import free

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class _Place:
    """A place in the model where a stub stands, and what stood there."""

    parent: nn.Module
    name: str
    stub: Stub

    def put(self, module: nn.Module) -> None:
        # Assigning to a name that is there keeps its place in the order of the modules.
        self.parent._modules[self.name] = module


class Split:
    """A model of which only one stage is left; made by `cut`.

    Attributes:
        model: the model that was cut.
        index: the stage that is left, 0 first.
        num_stages: number of stages of the whole model.
        trunk: where the layers are.
        layers: indices of the layers that are left.
        tied: names, within the model, of parameters that are on the first and on the last stage, such as tied
            embeddings; empty with one stage. The same on every stage.
        probe: what is known of the model.
    """

    def __init__(
        self,
        trunk: Trunk,
        index: int,
        layer_ranges: Sequence[range],
        tied: tuple[str, ...],
        places: Sequence[_Place],
        learned: Probe,
    ) -> None:
        self.model: PreTrainedModel = trunk.model
        self.index = index
        self.num_stages = len(layer_ranges)
        self.trunk = trunk
        self.layers = layer_ranges[index]
        self.tied = tied
        self.probe = learned
        self._places = tuple(places)
        self._whole = False

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the head and computes the loss."""
        return self.index == self.num_stages - 1

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the modules of other stages are back, on the meta device: all names, shapes and their order show.

        What belongs to this stage is the same objects inside and outside. The model cannot run inside. What is changed
        on the modules of other stages, such as `requires_grad`, is still so the next time.
        """
        if self._whole:
            yield
            return
        for place in self._places:
            place.put(place.stub.original)
        self._whole = True
        try:
            yield
        finally:
            for place in self._places:
                place.put(place.stub)
            self._whole = False


def cut(model: PreTrainedModel, stage_index: int, layer_ranges: Sequence[range]) -> Split:
    """Cut a model, in place, down to one stage and free the memory of the rest.

    Decoder layers of other stages give way to stubs at the same indices. What runs before the layers stays on the first
    stage only, what runs after them on the last; a module whose parameters are all on a stage anyway, such as a tied
    embedding, stays there too. Modules without parameters stay everywhere.

    Args:
        model: a causal language model of transformers, also the one inside a peft model.
        stage_index: the stage to leave, 0 first.
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
    _check_ranges(trunk, stage_index, layer_ranges)
    if len(layer_ranges) > 1 and learned.uncuttable is not None:
        raise ValueError(
            f"{type(model).__name__} can't be cut into stages between its layers: {learned.uncuttable}. "
            "Use num_stages=1 for it."
        )
    pieces = tuple(_pieces(trunk, layer_ranges, learned))
    homes = _homes(model, pieces, len(layer_ranges))
    tied = _tied(model, pieces, homes, len(layer_ranges))
    foreign = [piece for piece in pieces if not piece.stays_on(stage_index, homes)]
    free(
        [piece.module for piece in foreign],
        kept=[parameter for parameter in model.parameters() if stage_index in homes[id(parameter)]],
    )
    places = [piece.place(learned) for piece in foreign]
    for place in places:
        place.put(place.stub)
    return Split(trunk, stage_index, layer_ranges, tied, places, learned)


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


def _homes(model: PreTrainedModel, pieces: Sequence[_Piece], num_stages: int) -> dict[int, set[int]]:
    """The stages of every parameter, by its id; all of them for one that belongs to no piece."""
    homes: dict[int, set[int]] = {}
    for piece in pieces:
        for parameter in piece.module.parameters():
            homes.setdefault(id(parameter), set()).add(piece.stage)
    for parameter in model.parameters():
        homes.setdefault(id(parameter), set(range(num_stages)))
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


def _check_ranges(trunk: Trunk, stage_index: int, layer_ranges: Sequence[range]) -> None:
    count = len(trunk.layers)
    if len(layer_ranges) > count:
        raise ValueError(
            f"{len(layer_ranges)} stages for the {count} layers of {type(trunk.model).__name__}: a stage needs a layer "
            f"at least; use num_stages={count} or less"
        )
    shared_out = [index for indices in layer_ranges for index in indices]
    if shared_out != list(range(count)) or not all(map(len, layer_ranges)):
        raise ValueError(
            f"layer ranges {', '.join(map(str, layer_ranges))} do not share out layers 0 to {count - 1} in order, one "
            "or more to each stage"
        )
    if not 0 <= stage_index < len(layer_ranges):
        raise ValueError(f"stage index {stage_index} is not one of 0 to {len(layer_ranges) - 1}")
