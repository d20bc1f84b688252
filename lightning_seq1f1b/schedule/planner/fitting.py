"""Fits a pairs + b tokens + c to measured times, with coefficients that are not negative."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from lightning_seq1f1b.schedule.profile import Fit


class Sample(NamedTuple):
    """A measured time.

    Attributes:
        pairs: query-key pairs of the chunk, s P - s^2 / 2 for s tokens that end at P.
        tokens: of the chunk.
        seconds: what is to be fitted.
        whole: seconds of all that was measured at once, which an error is compared with.
    """

    pairs: float
    tokens: float
    seconds: float
    whole: float


def fit(samples: Sequence[Sample], *, attends: bool = True) -> Fit:
    """The fit with the least sum of squared relative errors, of all with coefficients of at least 0.

    Relative, because the time of a small chunk matters as much as that of a large one: there are more of them.

    Args:
        samples: at least one.
        attends: whether the part has attention; otherwise `pairs` is 0.
    """
    rows, targets = [], []
    for pairs, tokens, seconds, whole in samples:
        rows.append((pairs / whole, tokens / whole, 1 / whole))
        targets.append(seconds / whole)
    best, least = (0.0, 0.0, 0.0), sum(target * target for target in targets)
    columns = (0, 1, 2) if attends else (1, 2)
    # So few unknowns that every choice of those that are not zero can be tried: exact, and simpler than an iteration.
    for count in range(1, len(columns) + 1):
        for chosen in combinations(columns, count):
            solution = _least_squares([[row[column] for column in chosen] for row in rows], targets)
            if solution is None or min(solution) < 0:
                continue
            coefficients = [0.0, 0.0, 0.0]
            for column, value in zip(chosen, solution, strict=True):
                coefficients[column] = value
            error = sum(
                (sum(c * x for c, x in zip(coefficients, row, strict=True)) - target) ** 2
                for row, target in zip(rows, targets, strict=True)
            )
            if error < least * (1 - 1e-9):
                best, least = (coefficients[0], coefficients[1], coefficients[2]), error
    return Fit(*best)


def error(fitted: Fit, samples: Sequence[Sample]) -> float:
    """The mean error of a fit, relative to all that was measured at once."""
    errors = [abs(fitted(pairs, tokens) - seconds) / whole for pairs, tokens, seconds, whole in samples]
    return sum(errors) / len(errors)


def _least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float] | None:
    """Solve the normal equations, their columns scaled to one size; None when they are singular."""
    size = len(rows[0])
    scales = [sum(row[column] ** 2 for row in rows) ** 0.5 for column in range(size)]
    if min(scales) == 0:
        return None
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    matrix = [
        [sum(row[a] * row[b] for row in scaled) for b in range(size)]
        + [sum(row[a] * target for row, target in zip(scaled, targets, strict=True))]
        for a in range(size)
    ]
    for place in range(size):
        pivot = max(range(place, size), key=lambda row: abs(matrix[row][place]))
        if abs(matrix[pivot][place]) < 1e-9:
            return None
        matrix[place], matrix[pivot] = matrix[pivot], matrix[place]
        for row in range(size):
            if row != place:
                factor = matrix[row][place] / matrix[place][place]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[place], strict=True)]
    return [matrix[place][size] / matrix[place][place] / scales[place] for place in range(size)]
