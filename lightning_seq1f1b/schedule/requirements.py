"""Every action that a step consists of, where it runs, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_seq1f1b.schedule.actions import Action, Kind, Unit
from lightning_seq1f1b.schedule.dependencies import dependencies
from lightning_seq1f1b.schedule.transfers import Transfer, transfer


@dataclass
class Requirements:
    """What a complete plan contains.

    Attributes:
        rank: the rank of every action. An action that is no key has no place in the plan.
        waits_for: the actions that must be done before each action: a compute action waits for its dependencies on
            its own rank, and for the send and the receive of those on other ranks; a send waits for its producer;
            a receive is a non-blocking post and waits for nothing.
        transfers: all transfers of the step.
    """

    rank: dict[Action, int] = field(default_factory=dict)
    waits_for: dict[Action, tuple[Action, ...]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)


def requirements(stage_to_rank: Sequence[int], num_microbatches: int, num_chunks: int, *, trains: bool) -> Requirements:
    """The requirements of one step: a forward, and a backward if it `trains`, for every unit on every stage."""
    needed = Requirements()
    num_stages = len(stage_to_rank)
    for stage, rank in enumerate(stage_to_rank):
        for microbatch in range(num_microbatches):
            for chunk in range(num_chunks):
                for kind in (Kind.F, Kind.B) if trains else (Kind.F,):
                    action = Action(kind, stage, Unit(microbatch, chunk))
                    waits_for = []
                    for dependency in dependencies(action, num_stages, num_chunks):
                        message = transfer(dependency, action, stage_to_rank)
                        if message is None:
                            waits_for.append(dependency)
                            continue
                        waits_for += [message.send, message.receive]
                        needed.transfers.append(message)
                        needed.rank[message.send] = message.channel.source
                        needed.rank[message.receive] = message.channel.destination
                        needed.waits_for[message.send] = (dependency,)
                        needed.waits_for[message.receive] = ()
                    needed.rank[action] = rank
                    needed.waits_for[action] = tuple(waits_for)
    return needed
