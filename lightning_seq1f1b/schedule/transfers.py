"""Which tensors cross from rank to rank: the results whose producer and consumer run on different ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lightning_seq1f1b.schedule.codes import RECV_B, RECV_F, SEND_B, SEND_F, W
from lightning_seq1f1b.schedule.codes import F as FORWARD


class Channel(NamedTuple):
    """Messages from one rank to another in one direction of the pipeline; they carry no tag, so they match in order.

    Attributes:
        source: the sending rank.
        destination: the receiving rank.
        kind: "F" for hidden states, "B" for their gradients.
    """

    source: int
    destination: int
    kind: str

    def __str__(self) -> str:
        """For messages: `F from rank 0 to rank 1`."""
        return f"{self.kind} from rank {self.source} to rank {self.destination}"


class Transfer(NamedTuple):
    """The result of `producer`, sent after it on one rank and received for `consumer` on another; all are codes."""

    producer: int
    send: int
    receive: int
    consumer: int
    channel: Channel


def transfers(
    compute: Iterable[int],
    stage_to_rank: Sequence[int],
    num_indices: int,
    units_on_a_stage: int,
    first_trained_stage: int = 0,
) -> Iterator[Transfer]:
    """The messages that the results of compute actions need, in the order of those actions.

    F gives the input of F on the next stage; B, or I, the output gradient of B, or I, on the previous one.

    Args:
        compute: codes of compute actions.
        stage_to_rank: the rank of every stage.
        num_indices: `Codes.num_indices`.
        units_on_a_stage: `Codes.units_on_a_stage`.
        first_trained_stage: its backwards give nothing to the stage before it, which trains nothing.
    """
    last = len(stage_to_rank) - 1
    onward: list[Channel | None] = [None] * (last + 1)
    back: list[Channel | None] = [None] * (last + 1)
    for stage in range(last):
        here, there = stage_to_rank[stage], stage_to_rank[stage + 1]
        if here != there:
            onward[stage] = Channel(here, there, "F")
            if stage >= first_trained_stage:
                back[stage + 1] = Channel(there, here, "B")
    step = 8 * units_on_a_stage
    for code in compute:
        kind, stage = code & 7, (code >> 3) // units_on_a_stage
        if kind == FORWARD:
            channel = onward[stage]
            if channel is not None:
                yield Transfer(code, code - FORWARD + SEND_F, code + step - FORWARD + RECV_F, code + step, channel)
        elif kind != W:
            channel = back[stage]
            if channel is not None:
                yield Transfer(code, code - kind + SEND_B, code - step - kind + RECV_B, code - step, channel)
