"""How many chunks each of several different microbatches is cut into, so that all chunks carry about the same work."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite

_ROUNDING = 1e-9
"""Share of a chunk that is no reason for one more: equal works may differ in their last bits."""


def chunk_counts(works: Sequence[float], num_chunks: int) -> tuple[int, ...]:
    """Share out the chunks of a step: as many as let no chunk carry more work than if all microbatches were alike.

    Of alike microbatches, every chunk would carry total / (m * num_chunks). A microbatch gets the fewest chunks with
    which its own, cut into equal work, carry at most that. So equal works give `num_chunks` each, and the bubble, some
    chunks of waiting, does not grow with the differences.

    Args:
        works: work of every microbatch, such as its FLOPs, in any unit.
        num_chunks: chunks of a microbatch if all were alike.

    Returns:
        A number for each microbatch, at least 1; m * num_chunks to m * (num_chunks + 1) - 1 together.

    Raises:
        ValueError: for no microbatch, for a work that is negative or not finite, and for `num_chunks` below 1.
    """
    if not works or not all(isfinite(work) and work >= 0 for work in works):
        raise ValueError(f"works must be finite numbers, not negative, and at least one; they are {list(works)}")
    if num_chunks < 1:
        raise ValueError(f"num_chunks must be at least 1, not {num_chunks}")
    total = sum(works)
    if not total:
        return (1,) * len(works)
    shares = (num_chunks * len(works) * (work / total) for work in works)
    return tuple(max(1, ceil(share - _ROUNDING)) for share in shares)
