"""Compute orders: each policy is a pure function that says in which order every rank runs its forwards and backwards.

The pictures show forwards and backwards of one time unit each, links without latency: `a0` is the forward of microbatch
a, chunk 0; `A0` its backward; dots are idle time.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_seq1f1b.schedule.actions import Action, Kind, Unit

ComputeOrders = tuple[tuple[Action, ...], ...]
"""Compute actions of every rank, in order."""

Policy = Callable[[int, int, int], ComputeOrders]
"""(num_stages, num_microbatches, num_chunks) -> compute orders; stage s lies on rank s."""


def forward_only(num_stages: int, num_microbatches: int, num_chunks: int) -> ComputeOrders:
    """All forwards, microbatch after microbatch, chunk after chunk: what validation and prediction run.

    3 stages, 2 microbatches, 2 chunks:

        rank 0  a0a1b0b1....
        rank 1  ..a0a1b0b1..
        rank 2  ....a0a1b0b1
    """
    return tuple(tuple(_forwards(stage, num_microbatches, num_chunks)) for stage in range(num_stages))


def gpipe(num_stages: int, num_microbatches: int, num_chunks: int) -> ComputeOrders:
    """All forwards, then all backwards: GPipe on chunks, which is TeraPipe's order. Holds every unit at once.

    Backwards take the microbatches in the order of `seq1f1b`. The reverse order has the same bubble and the same peak;
    this one adds up the weight gradients in the same order as the other schedules, so they agree to the last bit.

    3 stages, 2 microbatches, 2 chunks:

        rank 0  a0a1b0b1........A1A0B1B0
        rank 1  ..a0a1b0b1....A1A0B1B0..
        rank 2  ....a0a1b0b1A1A0B1B0....
    """
    return tuple(
        (*_forwards(stage, num_microbatches, num_chunks), *_backwards(stage, num_microbatches, num_chunks))
        for stage in range(num_stages)
    )


def seq1f1b(num_stages: int, num_microbatches: int, num_chunks: int) -> ComputeOrders:
    """One forward, one backward on chunks: Seq1F1B (arXiv 2406.03488).

    Forwards run microbatch after microbatch, chunk after chunk. Backwards are first in, first out over microbatches
    and last in, first out over chunks, since the last chunk's backward must come first. Rank r warms up with
    p - r - 2 + k forwards: the last rank needs k - 1 before the forward that completes the first microbatch, and every
    rank before it one more. Then forwards and backwards alternate, and the remaining backwards follow.

    3 stages, 3 microbatches, 2 chunks:

        rank 0  a0a1b0b1....A1c0A0c1B1..B0..C1C0
        rank 1  ..a0a1b0..A1b1A0c0B1c1B0..C1C0..
        rank 2  ....a0a1A1b0A0b1B1c0B0c1C1C0....
    """
    orders = []
    for stage in range(num_stages):
        forwards = _forwards(stage, num_microbatches, num_chunks)
        backwards = _backwards(stage, num_microbatches, num_chunks)
        num_warmup = min(num_stages - stage - 2 + num_chunks, len(forwards))
        num_pairs = len(forwards) - num_warmup
        order = forwards[:num_warmup]
        for pair in zip(forwards[num_warmup:], backwards, strict=False):
            order.extend(pair)
        orders.append((*order, *backwards[num_pairs:]))
    return tuple(orders)


def one_f_one_b(num_stages: int, num_microbatches: int, num_chunks: int) -> ComputeOrders:
    """One forward, one backward on whole sequences: `seq1f1b` with one chunk, known as 1F1B or PipeDream-Flush.

    3 stages, 4 microbatches, 1 chunk:

        rank 0  a0b0c0....A0d0B0..C0..D0
        rank 1  ..a0b0..A0c0B0d0C0..D0..
        rank 2  ....a0A0b0B0c0C0d0D0....

    Raises:
        ValueError: if `num_chunks` is not 1.
    """
    if num_chunks != 1:
        raise ValueError(
            f"schedule '1f1b' moves whole sequences, but num_chunks is {num_chunks}; "
            "set num_chunks=1, or use schedule='seq1f1b' for one-forward-one-backward on chunks"
        )
    return seq1f1b(num_stages, num_microbatches, num_chunks)


POLICIES: dict[str, Policy] = {
    "seq1f1b": seq1f1b,
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "forward": forward_only,
}
"""The schedules by name."""


def _forwards(stage: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    return [
        Action(Kind.F, stage, Unit(microbatch, chunk))
        for microbatch in range(num_microbatches)
        for chunk in range(num_chunks)
    ]


def _backwards(stage: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    return [
        Action(Kind.B, stage, Unit(microbatch, chunk))
        for microbatch in range(num_microbatches)
        for chunk in reversed(range(num_chunks))
    ]
