"""Which tensors cross from rank to rank: the dependencies whose two ends run on different ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_seq1f1b.schedule.actions import Action, Kind

_SEND = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
_RECEIVE = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}


@dataclass(frozen=True)
class Channel:
    """Messages from one rank to another in one direction of the pipeline; they carry no tag, so they match in order.

    Attributes:
        source: the sending rank.
        destination: the receiving rank.
        kind: F for hidden states, B for their gradients.
    """

    source: int
    destination: int
    kind: Kind

    def __str__(self) -> str:
        """For messages: `F from rank 0 to rank 1`."""
        return f"{self.kind.value} from rank {self.source} to rank {self.destination}"


@dataclass(frozen=True)
class Transfer:
    """The result of `producer`, sent after it on one rank and received for `consumer` on another."""

    producer: Action
    consumer: Action
    send: Action
    receive: Action
    channel: Channel


def transfer(producer: Action, consumer: Action, stage_to_rank: Sequence[int]) -> Transfer | None:
    """The transfer behind a dependency of `consumer` on `producer`; None when both run on one rank."""
    source, destination = stage_to_rank[producer.stage], stage_to_rank[consumer.stage]
    if source == destination:
        return None
    return Transfer(
        producer=producer,
        consumer=consumer,
        send=Action(_SEND[producer.kind], producer.stage, producer.unit),
        receive=Action(_RECEIVE[consumer.kind], consumer.stage, consumer.unit),
        channel=Channel(source, destination, producer.kind),
    )
