"""Where to cut a row into chunks: equal tokens, equal work, or the user's own lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from lightning_seq1f1b.schedule.costs import ModelShape, flops_of_head, flops_of_layers
from lightning_seq1f1b.schedule.spans import Span, spans
from lightning_seq1f1b.schedule.suggest import unknown

Partition: TypeAlias = str | float | Sequence[int]
"""How to cut: "even", "balanced", a number from 0 (even) to 1 (balanced), or the chunks' lengths in tokens."""

ChunkCost: TypeAlias = Callable[[int, int], float]
"""(start, stop) -> cost of the tokens `start` to `stop` of a row, given everything before them."""

_NAMES = ("even", "balanced")

_MOST_IN_CHUNK_0 = 1.01
"""Cost of the first chunk, in shares, from which on what the others lose to rounding is spread over all of them."""


def partition(
    spec: Partition,
    length: int,
    num_chunks: int,
    shape: ModelShape,
    multiple: int = 1,
) -> tuple[Span, ...]:
    """Cut a row as the user asks.

    Args:
        spec: "even", "balanced", a number from 0 (even) to 1 (balanced) for boundaries in between, or the length of
            every chunk.
        length: tokens of the row.
        num_chunks: chunks to make.
        shape: the architecture, whose FLOPs "balanced" equalises.
        multiple: what all but "even" and 0 round to, see `balanced`.

    Raises:
        ValueError: for an unknown name, a number outside [0, 1], lengths that do not make `num_chunks` non-empty
            chunks of the row, or more chunks than tokens.
    """
    if isinstance(spec, str):
        if spec not in _NAMES:
            raise ValueError(
                unknown("partition", spec, _NAMES)
                + ", or give a number from 0 (even) to 1 (balanced), or the chunk lengths as a list"
            )
        spec = float(spec == "balanced")
    if isinstance(spec, (int, float)):
        return between(float(spec), length, num_chunks, training_flops(shape), multiple)
    lengths = tuple(spec)
    if len(lengths) != num_chunks:
        raise ValueError(
            f"partition lists {len(lengths)} chunk lengths, but num_chunks is {num_chunks}; make them agree"
        )
    if min(lengths) < 1:
        raise ValueError(f"every chunk needs at least one token, but partition is {list(lengths)}")
    if sum(lengths) != length:
        raise ValueError(
            f"the chunk lengths of partition {list(lengths)} add up to {sum(lengths)} tokens, but the rows have "
            f"{length}; change the list, or use partition='balanced', which fits any length"
        )
    return spans(lengths)


def even(length: int, num_chunks: int) -> tuple[Span, ...]:
    """Cut `length` tokens into `num_chunks` chunks whose lengths differ by at most one token.

    Raises:
        ValueError: if there are more chunks than tokens.
    """
    _check(length, num_chunks)
    return _between_bounds([index * length // num_chunks for index in range(num_chunks + 1)])


def balanced(length: int, num_chunks: int, shape: ModelShape, multiple: int = 1) -> tuple[Span, ...]:
    """Cut a row into chunks that take the same FLOPs, forward and backward: earlier chunks get more tokens.

    Args:
        length: tokens of the row.
        num_chunks: chunks to make.
        shape: the architecture.
        multiple: chunks start at multiples of this many tokens, for the kernels' sake. For rows too short to have
            `num_chunks` non-empty chunks that way it is halved until they have.

    Raises:
        ValueError: if there are more chunks than tokens, or `multiple` is below 1.
    """
    return equal_cost(length, num_chunks, training_flops(shape), multiple)


def training_flops(shape: ModelShape) -> ChunkCost:
    """FLOPs of forward and backward of a token range, all layers and the head."""

    def flops(start: int, stop: int) -> float:
        layers = flops_of_layers(shape, range(shape.num_layers), start, stop)
        return (layers + flops_of_head(shape, start, stop)).training

    return flops


def equal_cost(length: int, num_chunks: int, cost: ChunkCost, multiple: int = 1) -> tuple[Span, ...]:
    """Cut a row into chunks of equal cost: the computation-wise partition of Seq1F1B (arXiv 2406.03488).

    Solved from the last chunk back: each chunk is the longest whose cost is at most its share of the total, and
    chunk 0 gets the rest. In many short chunks the rest is much; then each chunk starts where it and those behind it
    cost at most their shares together, so that none is off by more than a token. Then the boundaries are rounded to
    the nearest multiple.

    Args:
        length: tokens of the row.
        num_chunks: chunks to make.
        cost: the cost of a token range; grows with the range at either end.
        multiple: as in `balanced`.

    Raises:
        ValueError: as in `balanced`.
    """
    return between(1.0, length, num_chunks, cost, multiple)


def between(boundary: float, length: int, num_chunks: int, cost: ChunkCost, multiple: int = 1) -> tuple[Span, ...]:
    """Cut a row somewhere between equal tokens and equal cost: less memory and larger kernels, or a smaller bubble.

    Every boundary lies that far on the way from its even place to its balanced place, and is then rounded.

    Args:
        boundary: 0 for `even`, 1 for `equal_cost`.
        length: tokens of the row.
        num_chunks: chunks to make.
        cost: as in `equal_cost`.
        multiple: as in `balanced`; at 0, chunks are even to a token instead.

    Raises:
        ValueError: as in `balanced`, or if `boundary` is not a number from 0 to 1.
    """
    if not 0 <= boundary <= 1:
        raise ValueError(f"a partition given as a number lies between 0 (even) and 1 (balanced), not at {boundary}")
    _check(length, num_chunks)
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1 token, not {multiple}")
    if boundary == 0:
        return even(length, num_chunks)
    share = cost(0, length) / num_chunks
    starts = [length]
    for index in range(num_chunks - 1, 0, -1):
        starts.append(_start_of_chunk(index, starts[-1], starts[-1], share, cost))
    if cost(0, starts[-1]) > _MOST_IN_CHUNK_0 * share:
        starts = [length]
        for index in range(num_chunks - 1, 0, -1):
            starts.append(_start_of_chunk(index, starts[-1], length, (num_chunks - index) * share, cost))
    inner = [
        boundary * start + (1 - boundary) * (index * length / num_chunks)
        for index, start in enumerate(starts[:0:-1], start=1)
    ]
    while True:
        bounds = [0, *(int(start + multiple / 2) // multiple * multiple for start in inner), length]
        if all(start < stop for start, stop in pairwise(bounds)):
            return _between_bounds(bounds)
        multiple //= 2


def _between_bounds(bounds: Sequence[int]) -> tuple[Span, ...]:
    return tuple(Span(start, stop) for start, stop in pairwise(bounds))


def _start_of_chunk(index: int, stop: int, end: int, most: float, cost: ChunkCost) -> int:
    """The earliest start of chunk `index`, which ends at `stop`, from which the tokens up to `end` cost at most `most`.

    It leaves at least one token for the chunk itself, and one for each of the `index` chunks before it.
    """
    low, high = index, stop - 1
    while low < high:
        middle = (low + high) // 2
        if cost(middle, end) <= most:
            high = middle
        else:
            low = middle + 1
    return low


def _check(length: int, num_chunks: int) -> None:
    if num_chunks < 1:
        raise ValueError(f"num_chunks must be at least 1, not {num_chunks}")
    if num_chunks > length:
        raise ValueError(
            f"{length} tokens cannot make {num_chunks} chunks of at least one token each; "
            f"set num_chunks to {length} or less, or use longer rows"
        )
