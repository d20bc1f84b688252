"""Proves that a plan is complete, ordered, matched between ranks, within its cap, and free of deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from lightning_seq1f1b.schedule.codes import RECV_B, RECV_F, SEND_B, SEND_F, B, F, I, W
from lightning_seq1f1b.schedule.dependencies import needs
from lightning_seq1f1b.schedule.plan_error import PlanError
from lightning_seq1f1b.schedule.stalls import global_order
from lightning_seq1f1b.schedule.transfers import Channel, Transfer, transfers

if TYPE_CHECKING:
    from lightning_seq1f1b.schedule.plan import Plan

_NOWHERE = -1


def verify(plan: Plan) -> None:
    """Check a plan for all ranks together, in time linear in its actions.

    - Complete: every unit's forward, and backward (or its two halves) if the plan trains its stage, stands exactly
      once, on the rank of its stage, and so does the send and the receive of everything that crosses from rank to rank.
      Nothing else stands there.
    - Ordered: on every rank an action stands after what it waits for, KV edges included.
    - Matched: on every channel the receives are posted in the order of the sends.
    - Within its cap: no rank holds more units at once than `plan.activation_cap`.
    - Free of deadlock: run together, with sends that do not block and receives posted in order, all ranks end.

    Raises:
        PlanError: with the reason, and the offending cell marked in a drawn grid.
        ValueError: if the plan does not have a row of actions for every rank.
    """
    _check_size(plan)
    rank_of = _expected_ranks(plan)
    place = _locate(plan, rank_of)
    messages = _messages(plan)
    sent_by = {message.producer: message.send for message in messages}
    _check_complete(plan, rank_of, place, messages)
    _check_messages_ordered(plan, place, messages)
    _check_channels(plan, place, messages)
    _check_cap(plan)
    try:
        global_order(plan.rows, plan.codes, sent_by)
    except PlanError:
        _check_compute_ordered(plan, place, sent_by)  # which says more than that the ranks stall
        raise


def _check_size(plan: Plan) -> None:
    ranks = len(set(plan.stage_to_rank))
    if (len(plan.stage_to_rank), max(plan.stage_to_rank) + 1, len(plan.rows)) != (plan.num_stages, ranks, ranks):
        raise ValueError(
            f"a plan of {plan.num_stages} stages needs a rank for every stage, and a row of actions for every rank; "
            f"stage_to_rank is {plan.stage_to_rank}, and there are {len(plan.rows)} rows"
        )


def _expected_ranks(plan: Plan) -> list[int]:
    """The rank of every code; `_NOWHERE` for those that have no place in the plan."""
    step = plan.codes.units_on_a_stage
    rank_of = [_NOWHERE] * (8 * plan.codes.num_indices)
    last = plan.num_stages - 1
    for stage, rank in enumerate(plan.stage_to_rank):
        kinds = [F]
        if plan.trains_stage(stage):
            kinds += [I, W] if plan.splits_backward else [B]
        if stage < last and plan.stage_to_rank[stage + 1] != rank:
            kinds += [SEND_F, RECV_B] if plan.trains_stage(stage) else [SEND_F]
        if stage > 0 and plan.stage_to_rank[stage - 1] != rank:
            kinds += [RECV_F, SEND_B] if plan.trains_stage(stage - 1) else [RECV_F]
        first = 8 * step * stage
        for kind in kinds:
            rank_of[first + kind : first + 8 * step : 8] = [rank] * step
    return rank_of


def _locate(plan: Plan, rank_of: Sequence[int]) -> list[int]:
    """The place of every code among its rank's actions; refuses what is foreign there or stands there twice."""
    place = [_NOWHERE] * len(rank_of)
    for rank, row in enumerate(plan.rows):
        for index, code in enumerate(row):
            if not 0 <= code < len(rank_of):
                raise ValueError(f"{code} at place {index} of rank {rank} is no code of this plan's actions")
            if rank_of[code] != rank or place[code] != _NOWHERE:
                raise PlanError(_misplaced(plan, rank_of[code], code, rank), plan.rows, plan.codes, rank, index)
            place[code] = index
    return place


def _misplaced(plan: Plan, expected: int, code: int, rank: int) -> str:
    action = plan.codes.decode(code)
    if expected == _NOWHERE:
        sizes = f"{plan.num_stages} stages and {plan.codes.chunks_in_words}"
        return f"{action} has no place in schedule {plan.schedule!r} with {sizes}"
    if expected != rank:
        return f"{action} belongs to rank {expected}, but stands on rank {rank}"
    return f"{action} stands twice on rank {rank}"


def _messages(plan: Plan) -> list[Transfer]:
    indices, step = plan.codes.num_indices, plan.codes.units_on_a_stage
    given = (plan.stage_to_rank, indices, step, plan.first_trained_stage)
    return list(chain.from_iterable(transfers(row, *given) for row in plan.compute_rows))


def _check_complete(plan: Plan, rank_of: Sequence[int], place: Sequence[int], messages: Sequence[Transfer]) -> None:
    if sum(map(len, plan.rows)) == len(rank_of) - rank_of.count(_NOWHERE):
        return
    missing = next(code for code, rank in enumerate(rank_of) if rank != _NOWHERE and place[code] == _NOWHERE)
    rank, name = rank_of[missing], plan.codes.decode(missing)
    for message in messages:
        if missing in (message.send, message.receive):
            other = message.receive if missing == message.send else message.send
            if place[other] != _NOWHERE:
                reason = f"{plan.codes.decode(other)} has no partner: rank {rank} lacks {name}"
                raise PlanError(reason, plan.rows, plan.codes, rank_of[other], place[other])
    row = plan.rows[rank]
    waiting = (
        index
        for index, code in enumerate(row)
        if (code & 7 <= W and missing in _needs(plan, code)) or (code & 7 in (SEND_F, SEND_B) and missing in _of(code))
    )
    raise PlanError(f"rank {rank} lacks {name}", plan.rows, plan.codes, rank, next(waiting, len(row)))


def _needs(plan: Plan, code: int) -> list[int]:
    return needs(code, plan.codes.num_indices, plan.codes.units_on_a_stage, plan.codes.lasts)


def _of(send: int) -> tuple[int, ...]:
    """What a send may send."""
    return (send - SEND_F + F,) if send & 7 == SEND_F else (send - SEND_B + B, send - SEND_B + I)


def _check_messages_ordered(plan: Plan, place: Sequence[int], messages: Sequence[Transfer]) -> None:
    for producer, send, receive, consumer, _ in messages:
        for earlier, later in ((producer, send), (receive, consumer)):
            if place[earlier] > place[later]:
                raise _disordered(plan, earlier, later, place)


def _check_compute_ordered(plan: Plan, place: Sequence[int], sent_by: dict[int, int]) -> None:
    step = plan.codes.units_on_a_stage
    apart = (8 * step, -8 * step)
    for row in plan.compute_rows:
        for code in row:
            for needed in _needs(plan, code):
                if needed - code in apart and needed in sent_by:
                    continue
                if place[needed] > place[code]:
                    raise _disordered(plan, needed, code, place)


def _disordered(plan: Plan, earlier: int, later: int, place: Sequence[int]) -> PlanError:
    rank = plan.stage_to_rank[(later >> 3) // plan.codes.units_on_a_stage]
    first, second = plan.codes.decode(earlier), plan.codes.decode(later)
    reason = f"{second} stands before {first}, which it waits for"
    return PlanError(reason, plan.rows, plan.codes, rank, place[later])


def _check_channels(plan: Plan, place: Sequence[int], messages: Sequence[Transfer]) -> None:
    channels: defaultdict[Channel, list[Transfer]] = defaultdict(list)
    for message in messages:
        channels[message.channel].append(message)
    for channel, listed in channels.items():
        listed.sort(key=lambda message: place[message.send])
        for message, following in pairwise(listed):
            if place[following.receive] < place[message.receive]:
                late, early = plan.codes.decode(message.receive), plan.codes.decode(following.receive)
                raise PlanError(
                    f"{channel}: {early} is posted before {late}, but sent after it, and messages match in order",
                    plan.rows,
                    plan.codes,
                    channel.destination,
                    place[following.receive],
                )


def _check_cap(plan: Plan) -> None:
    cap = plan.activation_cap
    if cap is None:
        return
    last = W if plan.splits_backward else B
    untrained = plan.first_trained_stage * plan.codes.units_on_a_stage
    for rank, row in enumerate(plan.rows):
        held = 0
        for index, code in enumerate(row):
            kind = code & 7
            held += (kind == F and code >> 3 >= untrained) - (kind == last)
            if held > cap:
                reason = (
                    f"rank {rank} would hold {held} units at {plan.codes.decode(code)}, more than activation_cap={cap}"
                )
                raise PlanError(reason, plan.rows, plan.codes, rank, index)
