"""Where a model keeps its decoder layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Trunk:
    """The module that owns the list of decoder layers.

    Attributes:
        model: the causal language model.
        module: the owner of the list.
        name: its dotted name in the model; "" when it is the model itself.
        attribute: the owner's name for the list.
    """

    model: PreTrainedModel
    module: nn.Module
    name: str
    attribute: str

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return getattr(self.module, self.attribute)

    def siblings(self) -> Iterator[tuple[nn.Module, str, str]]:
        """Every module beside the way from the model down to its layers, as (parent, name in the parent, full name).

        Embeddings, norms, the head: together with the layers they make up the model.
        """
        way = [*self.name.split("."), self.attribute] if self.name else [self.attribute]
        parent: nn.Module = self.model
        prefix = ""
        for step in way:
            for name, _ in parent.named_children():
                if name != step:
                    yield parent, name, prefix + name
            parent = getattr(parent, step)
            prefix += step + "."


def find_trunk(model: PreTrainedModel) -> Trunk:
    """Find the list of decoder layers.

    It is a ModuleList of `num_hidden_layers` entries, or, where that counts something else, of the model's own
    unsplittable layer classes; among several the one that holds such layers, then the one with most parameters.

    Raises:
        ValueError: the model has no such list.
    """
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    unsplittable = set(model._no_split_modules or ())
    lists = [
        (name, owner, attribute, layers)
        for name, owner in model.named_modules()
        for attribute, layers in owner.named_children()
        if isinstance(layers, nn.ModuleList) and len(layers) > 0
    ]
    candidates = [each for each in lists if len(each[3]) == count] or [
        each for each in lists if all(type(layer).__name__ in unsplittable for layer in each[3])
    ]
    if not candidates:
        raise ValueError(
            f"{type(model).__name__} has no list of decoder layers: no ModuleList with as many entries as "
            f"config.num_hidden_layers ({count}). Only decoder-only models with such a list can be cut into stages."
        )

    def rank(candidate: tuple[str, nn.Module, str, nn.ModuleList]) -> tuple[bool, int]:
        layers = candidate[3]
        known = any(type(layer).__name__ in unsplittable for layer in layers)
        return known, sum(parameter.numel() for parameter in layers.parameters())

    name, owner, attribute, _ = max(candidates, key=rank)
    return Trunk(model, owner, name, attribute)
