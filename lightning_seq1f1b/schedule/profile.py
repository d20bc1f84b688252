"""Measured times of a model's parts on one machine, as a file that outlives the measurement."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_seq1f1b.schedule.costs import LayerShape, ModelShape

FORMAT = "lightning_seq1f1b.profile"
VERSION = 1
PASSES = ("forward", "input_grad", "weight_grad")
PARTS = ("layer", "embedding", "head")


@dataclass(frozen=True)
class Fit:
    """Seconds of one part for a chunk of s tokens that ends at token P: pairs (s P - s^2 / 2) + tokens s + constant."""

    pairs: float
    tokens: float
    constant: float

    def __call__(self, pairs: float, tokens: float) -> float:
        """Seconds for that many query-key pairs and tokens."""
        return self.pairs * pairs + self.tokens * tokens + self.constant


@dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        shape: the architecture that was measured.
        rows: rows of the microbatches that were measured.
        dtype: of the activations, such as "bfloat16".
        device: where, in words.
        layer: fits of one decoder layer, by pass: "forward", "input_grad", "weight_grad".
        embedding: fits of what runs before the layers.
        head: fits of what runs after them, the loss included.
    """

    shape: ModelShape
    rows: int
    dtype: str
    device: str
    layer: dict[str, Fit]
    embedding: dict[str, Fit]
    head: dict[str, Fit]

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, shape: ModelShape) -> Profile:
        """Read what `to_json` wrote.

        Args:
            text: the file's content.
            shape: the architecture that the profile is wanted for.

        Raises:
            ValueError: for anything but a profile, and for one of another model.
        """
        try:
            content: dict[str, Any] = json.loads(text)
            if not isinstance(content, dict) or (content.pop("format", None), content.pop("version", None)) != (
                FORMAT,
                VERSION,
            ):
                raise ValueError(f"its format is not {FORMAT} {VERSION}")
            layer, embedding, head = (
                {name: Fit(**passes[name]) for name in PASSES} for passes in map(content.pop, PARTS)
            )
            shape_measured = _shape(content.pop("shape"))
            profile = cls(**content, shape=shape_measured, layer=layer, embedding=embedding, head=head)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"this is not a profile that `lightning-seq1f1b profile` wrote: {reason}") from error
        names = [field.name for field in fields(ModelShape) if field.name != "layers"]
        pairs = [(name, getattr(profile.shape, name), getattr(shape, name)) for name in names]
        different = [f"{name} {measured} instead of {wanted}" for name, measured, wanted in pairs if measured != wanted]
        if not different and _work(profile.shape) != _work(shape):
            different = ["layers of other sizes or windows"]
        if different:
            raise ValueError(
                f"the profile is of another model ({'; '.join(different)}): make one of this model with "
                "`lightning-seq1f1b profile`"
            )
        return profile


def _shape(content: dict[str, Any]) -> ModelShape:
    layers = tuple(LayerShape(**layer) for layer in content.pop("layers"))
    return ModelShape(**content, layers=layers)


def _work(shape: ModelShape) -> list[object]:
    """What times depend on; what layers keep for the backward changes with the versions of libraries."""
    layers = map(shape.layer, range(shape.num_layers))
    return [(layer.matrices, layer.pair_width, layer.window) for layer in layers]
