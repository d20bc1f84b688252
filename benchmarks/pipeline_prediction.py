"""The bubble of a plan as a measured profile of its stages predicts it, and as the wall clock saw it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.costs import attended_pairs
from lightning_seq1f1b.schedule.plan import Plan
from lightning_seq1f1b.schedule.profile import Fit
from lightning_seq1f1b.schedule.simulate import simulate
from lightning_seq1f1b.schedule.spans import Span
from lightning_seq1f1b.schedule.timeline import Event, busy_time, makespan

Sample = tuple[Action, Span, float]
"""A unit, its chunk's tokens, and its seconds."""


def fit_profile(samples: Iterable[Sample]) -> dict[tuple[int, Kind], Fit]:
    """Fit a(sP - s^2/2) + bs + c to the seconds of units, by least squares, for every stage and kind.

    Args:
        samples: units of chunks of several lengths and places.
    """
    grouped: dict[tuple[int, Kind], list[tuple[Span, float]]] = {}
    for action, span, seconds in samples:
        grouped.setdefault((action.stage, action.kind), []).append((span, seconds))
    return {key: _fit(group) for key, group in grouped.items()}


def _fit(group: Sequence[tuple[Span, float]]) -> Fit:
    # Whole rows of a unit's size as the scale keep the three columns comparable.
    scale = max(span.stop for span, _ in group)
    columns = [[attended_pairs(span.start, span.stop) / scale**2, span.length / scale, 1.0] for span, _ in group]
    left, right = torch.tensor(columns, dtype=torch.float64), torch.tensor([[s] for _, s in group], dtype=torch.float64)
    pairs, tokens, constant = torch.linalg.lstsq(left, right, driver="gelsd").solution.flatten().tolist()
    return Fit(pairs / scale**2, tokens / scale, constant)


def predicted_bubble(plan: Plan, spans: Sequence[Span], fits: dict[tuple[int, Kind], Fit]) -> float:
    """Share of the ranks' time in a step that they would idle with the fitted times and instant messages."""

    def seconds(action: Action) -> float:
        span = spans[action.unit.chunk]
        fitted = fits[action.stage, action.kind](attended_pairs(span.start, span.stop), span.length)
        return max(fitted, 0.0)

    return idle_share(simulate(plan, seconds, early_weight_grads=True).timeline, len(plan.compute))


def idle_share(timeline: Iterable[Event], num_ranks: int) -> float:
    """Share of the ranks' time, from the first start to the last end, in which they compute nothing."""
    events = list(timeline)
    return 1 - float(sum(busy_time(events).values())) / float(makespan(events)) / num_ranks
