"""The schedules by name, and the rule by which forwards and backwards mix in each of them.

The pictures show forwards and backwards of one time unit each, links without latency: `a0` is the forward of microbatch
a, chunk 0; `A0` its backward; dots are idle time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_seq1f1b.schedule.unit_orders import UnitOrders


@dataclass(frozen=True)
class Policy:
    """One member of the family.

    Attributes:
        summary: one line for help texts.
        interleaves: whether ranks may hold several stages.
        splits_backward: whether the backward runs in two halves, I and W.
        on_chunks: for one that moves whole sequences, and so has one chunk, the name of the same on chunks.
        interleaved: for one with a single stage on a rank, the name of the same with several.
        memory_knob: extra warm-up forwards of a rank for each rank behind it, by default; None when all forwards come
            first, and no knob has an effect.
        trains: whether it has backwards.
    """

    summary: str
    interleaves: bool = False
    splits_backward: bool = False
    on_chunks: str | None = None
    interleaved: str | None = None
    memory_knob: int | None = 1
    trains: bool = True

    @property
    def whole_rows(self) -> bool:
        """Whether it moves whole sequences."""
        return self.on_chunks is not None


POLICIES: dict[str, Policy] = {
    "seq1f1b": Policy("one forward, one backward on chunks", interleaved="interleaved_seq1f1b"),
    "interleaved_seq1f1b": Policy("seq1f1b with several stages on a rank", interleaves=True),
    "seq1f1b_zb": Policy("seq1f1b with a split backward", splits_backward=True, interleaved="interleaved_seq1f1b_zb"),
    "interleaved_seq1f1b_zb": Policy(
        "several stages on a rank and a split backward: the smallest bubble", interleaves=True, splits_backward=True
    ),
    "1f1b": Policy("one forward, one backward on whole sequences", on_chunks="seq1f1b", interleaved="interleaved_1f1b"),
    "interleaved_1f1b": Policy(
        "1f1b with several stages on a rank", interleaves=True, on_chunks="interleaved_seq1f1b", memory_knob=2
    ),
    "zb1p": Policy(
        "1f1b with a split backward",
        splits_backward=True,
        on_chunks="seq1f1b_zb",
        interleaved="interleaved_seq1f1b_zb",
    ),
    "gpipe": Policy("all forwards, then all backwards, on chunks", memory_knob=None, interleaved="interleaved_seq1f1b"),
    "forward": Policy("forwards alone: what evaluation runs", interleaves=True, memory_knob=None, trains=False),
}
"""The schedules by name."""


def mix(orders: UnitOrders, rank: int, warmup: int) -> list[int]:
    """Codes of a rank's actions: `warmup` forwards, then one forward and one backward in turns, then backwards.

    3 stages, 3 microbatches, 2 chunks under `seq1f1b`, where rank r warms up with p - r - 2 + k forwards:

        rank 0  a0a1b0b1....A1c0A0c1B1..B0..C1C0
        rank 1  ..a0a1b0..A1b1A0c0B1c1B0..C1C0..
        rank 2  ....a0a1A1b0A0b1B1c0B0c1C1C0....

    3 stages, 4 microbatches under `1f1b`, also known as PipeDream-Flush:

        rank 0  a0b0c0....A0d0B0..C0..D0
        rank 1  ..a0b0..A0c0B0d0C0..D0..
        rank 2  ....a0A0b0B0c0C0d0D0....

    3 stages, 2 microbatches, 2 chunks under `gpipe`, which warms up with all of them; on chunks this is TeraPipe's
    order. Backwards take the microbatches as in the other schedules. The reverse order has the same bubble and peak;
    this one adds up the weight gradients in the same order, so that they agree to the last bit:

        rank 0  a0a1b0b1........A1A0B1B0
        rank 1  ..a0a1b0b1....A1A0B1B0..
        rank 2  ....a0a1b0b1A1A0B1B0....

    Args:
        orders: the order of the forwards and that of the backwards.
        rank: whose actions.
        warmup: how many forwards come before the first turn; all of them where there are fewer.
    """
    forwards, backwards = orders.forwards(rank), orders.backwards(rank)
    mixed = forwards[:warmup]
    turns = forwards[warmup:]
    for pair in zip(turns, backwards, strict=False):
        mixed += pair
    return mixed + backwards[len(turns) :]


def warmups(orders: UnitOrders, knob: float) -> list[int]:
    """Warm-up forwards of every rank: those before the last rank's first backward, and `knob` more per rank behind.

    The last rank needs v k - 1 forwards (with groups of whole microbatches, see `UnitOrders`) before the one that
    completes the first microbatch; a rank before it must be ahead for as long as its results are under way. Where
    microbatches have different numbers of chunks, k is the largest of them: so many units are held in any case when
    that microbatch turns, and from the first turn to the last every forward is as far ahead as it ever has to be.
    """
    last = orders.num_ranks - 1
    needed = orders.before_the_first_backward
    return [min(needed + math.ceil(knob * (last - rank)), orders.length) for rank in range(orders.num_ranks)]


def forward_only(orders: UnitOrders) -> list[list[int]]:
    """All forwards, microbatch after microbatch, chunk after chunk: what validation and prediction run.

    3 stages, 2 microbatches, 2 chunks:

        rank 0  a0a1b0b1....
        rank 1  ..a0a1b0b1..
        rank 2  ....a0a1b0b1
    """
    return [orders.forwards(rank) for rank in range(orders.num_ranks)]
