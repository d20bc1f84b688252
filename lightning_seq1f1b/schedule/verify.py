"""Proves that a plan is complete, ordered, matched between ranks, and free of deadlock."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.global_order import global_order
from lightning_seq1f1b.schedule.plan_error import PlanError
from lightning_seq1f1b.schedule.requirements import Requirements, requirements
from lightning_seq1f1b.schedule.transfers import Channel, Transfer

if TYPE_CHECKING:
    from lightning_seq1f1b.schedule.plan import Plan

Cell = tuple[int, int]
"""Where an action stands: its rank, and its place among the rank's actions."""


def verify(plan: Plan) -> None:
    """Check a plan for all ranks together, in time linear in its actions.

    - Complete: every unit's forward, and backward if the plan trains, stands exactly once, on the rank of its stage,
      and so does the send and the receive of everything that crosses from rank to rank. Nothing else stands there.
    - Ordered: on every rank an action stands after what it waits for, KV edges included.
    - Matched: on every channel the receives are posted in the order of the sends.
    - Free of deadlock: run together, with sends that do not block and receives posted in order, all ranks end.

    Raises:
        PlanError: with the reason, and the offending cell marked in a drawn grid.
        ValueError: if the plan does not have a row of actions for every rank.
    """
    _check_size(plan)
    needed = requirements(plan.stage_to_rank, plan.num_microbatches, plan.num_chunks, trains=plan.trains)
    cells = _locate(plan, needed)
    _check_complete(plan, needed, cells)
    _check_compute(plan)
    _check_ordered(plan, needed, cells)
    _check_channels(plan, needed, cells)
    global_order(plan.actions, needed.waits_for)


def _check_size(plan: Plan) -> None:
    ranks = len(set(plan.stage_to_rank))
    sizes = (len(plan.stage_to_rank), max(plan.stage_to_rank) + 1, len(plan.compute), len(plan.actions))
    if sizes != (plan.num_stages, ranks, ranks, ranks):
        raise ValueError(
            f"a plan of {plan.num_stages} stages needs a rank for every stage, and a row of compute actions and a row "
            f"of actions for every rank; stage_to_rank is {plan.stage_to_rank}, and there are {len(plan.compute)} and "
            f"{len(plan.actions)} rows"
        )


def _locate(plan: Plan, needed: Requirements) -> dict[Action, Cell]:
    """The cell of every action; refuses those that have no place, stand on the wrong rank, or stand there twice."""
    cells: dict[Action, Cell] = {}
    for rank, row in enumerate(plan.actions):
        for index, action in enumerate(row):
            if action not in needed.rank:
                units = f"{plan.num_microbatches} microbatches of {plan.num_chunks} chunks"
                reason = (
                    f"{action} has no place in schedule {plan.schedule!r} with {plan.num_stages} stages and {units}"
                )
            elif needed.rank[action] != rank:
                reason = f"{action} belongs to rank {needed.rank[action]}, but stands on rank {rank}"
            elif action in cells:
                reason = f"{action} stands twice on rank {rank}"
            else:
                cells[action] = (rank, index)
                continue
            raise PlanError(reason, plan.actions, rank, index)
    return cells


def _check_complete(plan: Plan, needed: Requirements, cells: dict[Action, Cell]) -> None:
    missing = next((action for action in needed.rank if action not in cells), None)
    if missing is None:
        return
    rank = needed.rank[missing]
    for message in needed.transfers:
        if missing in (message.send, message.receive):
            other = message.receive if missing == message.send else message.send
            if other in cells:
                raise PlanError(f"{other} has no partner: rank {rank} lacks {missing}", plan.actions, *cells[other])
    dependents = (cells[action] for action, needs in needed.waits_for.items() if missing in needs and action in cells)
    marked = min((cell for cell in dependents if cell[0] == rank), default=(rank, len(plan.actions[rank])))
    raise PlanError(f"rank {rank} lacks {missing}", plan.actions, *marked)


def _check_compute(plan: Plan) -> None:
    for rank, row in enumerate(plan.actions):
        places = [index for index, action in enumerate(row) if action.computes]
        for index, action in zip(places, plan.compute[rank], strict=False):
            if row[index] != action:
                raise PlanError(
                    f"rank {rank} computes {row[index]} where its compute order has {action}", plan.actions, rank, index
                )
        if len(places) != len(plan.compute[rank]):
            raise PlanError(
                f"rank {rank} computes {len(places)} actions, but its compute order has {len(plan.compute[rank])}",
                plan.actions,
                rank,
                len(row),
            )


def _check_ordered(plan: Plan, needed: Requirements, cells: dict[Action, Cell]) -> None:
    for action, (rank, index) in cells.items():
        for earlier in needed.waits_for[action]:
            if cells[earlier][0] == rank and cells[earlier][1] > index:
                raise PlanError(f"{action} stands before {earlier}, which it waits for", plan.actions, rank, index)


def _check_channels(plan: Plan, needed: Requirements, cells: dict[Action, Cell]) -> None:
    channels: defaultdict[Channel, list[Transfer]] = defaultdict(list)
    for message in needed.transfers:
        channels[message.channel].append(message)
    for channel, messages in channels.items():
        messages.sort(key=lambda message: cells[message.send])
        for message, following in pairwise(messages):
            if cells[following.receive] < cells[message.receive]:
                raise PlanError(
                    f"{channel}: {following.receive} is posted before {message.receive}, but sent after it, "
                    "and messages match in order",
                    plan.actions,
                    *cells[following.receive],
                )
