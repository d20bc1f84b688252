"""What becomes of one family: exact under chunking and cutting, refused with a reason, or not judged."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from support.float64 import float64_throughout
from support.staged_run import LAYER_RANGES, largest_difference, make_stages, run_stages, run_whole
from support.tiny_models import NUM_LAYERS, tiny_batch, tiny_model
from transformers import PreTrainedModel

from lightning_seq1f1b.models.trunk import find_trunk

TOLERANCE = 1e-10

CHUNK_LENGTHS = (7, 13, 2, 22)
"""Uneven, and some shorter than the windows of tiny models."""


@dataclass(frozen=True)
class Verdict:
    """What was found of one family.

    Attributes:
        family: the model type.
        model: name of the class.
        result: "exact", "exact, one stage", "refused", "not judged" or "wrong".
        reason: why, where it is not exact.
        difference: the largest difference of loss or gradients, where both could be computed.
    """

    family: str
    model: str
    result: str
    reason: str = ""
    difference: float | None = None


def judge(family: str, model_class: str) -> Verdict:
    """Run a tiny model of the family whole, and cut into three stages and four chunks, in double precision."""
    try:
        model = tiny_model(family)
        if sum(parameter.numel() for parameter in model.parameters()) > 20_000_000:
            raise ValueError("no tiny model: its config does not say all of its sizes")
    except Exception as error:
        return Verdict(family, model_class, "not judged", f"no tiny model could be made: {_said(error)}")
    model_class = type(model).__name__
    batch = tiny_batch(length=sum(CHUNK_LENGTHS))
    count = _number_of_layers(model)
    ranges = LAYER_RANGES if count == 4 else (range(1), range(1, count - 1), range(count - 1, count))
    with float64_throughout(), _default_float64():
        try:
            stages = make_stages(model, ranges)
            result, reason = "exact", ""
        except ValueError as refusal:
            try:
                stages = make_stages(model, (range(count),))
                result, reason = "exact, one stage", str(refusal)
            except ValueError as second:
                return Verdict(family, model_class, "refused", str(second))
        try:
            truth = run_whole(copy.deepcopy(model), batch)
        except Exception as error:
            return Verdict(family, model_class, "not judged", f"one device cannot train it on text: {_said(error)}")
        if not any(gradient is not None and torch.any(gradient) for gradient in truth.gradients.values()):
            return Verdict(family, model_class, "not judged", "it has no gradients on one device")
        try:
            difference = largest_difference(run_stages(stages, batch, CHUNK_LENGTHS), truth)
        except Exception as error:
            return Verdict(family, model_class, "wrong", _said(error))
    if not difference < TOLERANCE:
        return Verdict(family, model_class, "wrong", reason, difference)
    return Verdict(family, model_class, result, reason, difference)


def _number_of_layers(model: PreTrainedModel) -> int:
    try:
        return len(find_trunk(model).layers)
    except ValueError:  # which cutting will say
        return NUM_LAYERS


@contextmanager
def _default_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
