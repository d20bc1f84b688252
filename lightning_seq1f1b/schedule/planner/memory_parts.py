"""What the fullest moment of every rank is made of."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_seq1f1b.schedule.actions import Kind
from lightning_seq1f1b.schedule.memory_curve import UnitSizes
from lightning_seq1f1b.schedule.timeline import Event

Parts = tuple[float, float, float]
"""Bytes of activations, of keys and values, and of logits."""


def fullest_moments(
    timeline: Iterable[Event], num_ranks: int, sizes: UnitSizes, without_logits: UnitSizes
) -> tuple[Parts, ...]:
    """The parts of what units hold, for every rank at the moment when it holds most.

    Args:
        timeline: a step that trains; every rank's actions in their order.
        num_ranks: ranks of the timeline.
        sizes: what units take, see `UnitSizes` for from when to when.
        without_logits: the same for a model that has no LM head.
    """
    rows_of_keys_values = [sum(row) for row in sizes.keys_values]
    head = _difference(sizes.activations, without_logits.activations)
    deferred_head = _difference(sizes.deferred, without_logits.deferred)
    now = [[0.0, 0.0, 0.0] for _ in range(num_ranks)]
    most = [0.0] * num_ranks
    fullest: list[Parts] = [(0.0, 0.0, 0.0)] * num_ranks
    for event in timeline:
        rank, (kind, stage, (_, chunk)) = event.rank, event.action
        held = now[rank]
        if kind is Kind.F:
            held[0] += without_logits.activations[stage][chunk]
            held[1] += sizes.keys_values[stage][chunk]
            held[2] += head[stage][chunk]
        elif kind is Kind.W:
            held[0] -= without_logits.deferred[stage][chunk]
            held[2] -= deferred_head[stage][chunk]
        else:
            held[0] -= without_logits.activations[stage][chunk]
            held[2] -= head[stage][chunk]
            if kind is Kind.I:
                held[0] += without_logits.deferred[stage][chunk]
                held[2] += deferred_head[stage][chunk]
            if chunk == 0:
                held[1] -= rows_of_keys_values[stage]
        total = held[0] + held[1] + held[2]
        if total > most[rank]:
            most[rank] = total
            fullest[rank] = (held[0], held[1], held[2])
    return tuple(fullest)


def _difference(one: tuple[tuple[float, ...], ...], other: tuple[tuple[float, ...], ...]) -> list[list[float]]:
    return [
        [first - second for first, second in zip(row, other_row, strict=True)]
        for row, other_row in zip(one, other, strict=True)
    ]
