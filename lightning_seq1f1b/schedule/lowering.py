"""From compute orders to full plans: adds the sends and receives, one order for both ends of every channel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lightning_seq1f1b.schedule.codes import Codes
from lightning_seq1f1b.schedule.transfers import Channel, Transfer, transfers


def lower(
    compute: Sequence[Sequence[int]], stage_to_rank: Sequence[int], codes: Codes, first_trained_stage: int = 0
) -> tuple[tuple[int, ...], ...]:
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
        compute: codes of the compute actions of every rank, in order.
        stage_to_rank: the rank of every stage.
        codes: the numbering.
        first_trained_stage: the stage whose backwards nobody waits for.

    Returns:
        Codes of all actions of every rank, in order.
    """
    num_indices, step = codes.num_indices, codes.units_on_a_stage
    place = [0] * (8 * num_indices)
    for row in compute:
        for index, code in enumerate(row):
            place[code] = index
    sends: dict[int, int] = {}
    channels: defaultdict[Channel, list[Transfer]] = defaultdict(list)
    for row in compute:
        for message in transfers(row, stage_to_rank, num_indices, step, first_trained_stage):
            sends[message.producer] = message.send
            channels[message.channel].append(message)
    posts: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in compute]
    for channel, messages in channels.items():
        _post(messages, place, posts[channel.destination])
    lowered = []
    for row, post in zip(compute, posts, strict=True):
        actions: list[int] = []
        for index, code in enumerate(row):
            if index in post:
                actions += post[index]
            actions.append(code)
            if code in sends:
                actions.append(sends[code])
        lowered.append(tuple(actions))
    return tuple(lowered)


def _post(messages: Sequence[Transfer], place: Sequence[int], posts: defaultdict[int, list[int]]) -> None:
    """Put each receive of a channel before a compute action of the receiving rank, in the sends' order."""
    slots = []
    latest = len(place)
    for message in reversed(messages):
        latest = min(latest, max(place[message.consumer] - 1, 0))
        slots.append(latest)
    for slot, message in zip(reversed(slots), messages, strict=True):
        posts[slot].append(message.receive)
