"""From compute orders to full plans: adds the sends and receives, one order for both ends of every channel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.dependencies import dependencies
from lightning_seq1f1b.schedule.transfers import Channel, Transfer, transfer


def lower(
    compute: Sequence[Sequence[Action]], stage_to_rank: Sequence[int], num_chunks: int
) -> tuple[tuple[Action, ...], ...]:
    """Add a send after every compute action whose result another rank needs, and the receives for it there.

    Sends are non-blocking and stand right after their producer. A receive is a non-blocking post that stands one
    compute action ahead of its consumer, so that a transfer overlaps that action; the consumer waits for the data.
    Messages carry no tag, so on every channel receives are posted in the order of the sends, which may move a post
    further ahead.

        compute   rank 0   0F0.0           0F0.1           0F1.0
                  rank 1                         1F0.0           1F0.1           1F1.0
        lowered   rank 0   0F0.0 0SEND_F0.0 0F0.1 0SEND_F0.1 0F1.0 0SEND_F1.0
                  rank 1   1RECV_F0.0 1RECV_F0.1 1F0.0 1RECV_F1.0 1F0.1 1F1.0

    Args:
        compute: compute actions of every rank, in order.
        stage_to_rank: the rank of every stage.
        num_chunks: chunks of one microbatch.

    Returns:
        All actions of every rank, in order.
    """
    num_stages = len(stage_to_rank)
    outgoing: defaultdict[Action, list[Transfer]] = defaultdict(list)
    for consumer in chain(*compute):
        for producer in dependencies(consumer, num_stages, num_chunks):
            if (message := transfer(producer, consumer, stage_to_rank)) is not None:
                outgoing[producer].append(message)
    channels: defaultdict[Channel, list[Transfer]] = defaultdict(list)
    for producer in chain(*compute):
        for message in outgoing[producer]:
            channels[message.channel].append(message)

    place = {action: index for row in compute for index, action in enumerate(row)}
    posts: list[list[list[Action]]] = [[[] for _ in row] for row in compute]
    for channel, messages in channels.items():
        for slot, message in _slots(messages, place):
            posts[channel.destination][slot].append(message.receive)

    return tuple(
        tuple(
            chain.from_iterable(
                (*received, action, *(message.send for message in outgoing[action]))
                for received, action in zip(posts[rank], row, strict=True)
            )
        )
        for rank, row in enumerate(compute)
    )


def _slots(messages: Sequence[Transfer], place: Mapping[Action, int]) -> list[tuple[int, Transfer]]:
    """Before which compute action of the receiving rank each message of a channel is posted, in the sends' order."""
    slots = []
    latest = len(place)
    for message in reversed(messages):
        latest = min(latest, max(place[message.consumer] - 1, 0))
        slots.append((latest, message))
    return slots[::-1]
