"""Runs the ranks of a plan together, without times, to see that none waits for ever."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from lightning_seq1f1b.schedule.codes import Codes, W
from lightning_seq1f1b.schedule.dependencies import needs
from lightning_seq1f1b.schedule.plan_error import PlanError


def global_order(rows: Sequence[Sequence[int]], codes: Codes, sent_by: Mapping[int, int]) -> list[int]:
    """One order of all ranks' actions in which each finds what it waits for.

    Every rank takes its actions in order. Sends do not block, receives are posted in order and do not block, and a
    compute action waits for what it needs, or, where that is another rank's, for its send. Takes time linear in the
    number of actions.

    Args:
        rows: codes of all actions of every rank, in order.
        codes: the numbering.
        sent_by: the send of every compute action whose result crosses to another rank.

    Raises:
        PlanError: if the ranks wait for each other; says what each of them waits for.
    """
    num_indices, step, lasts = codes.num_indices, codes.units_on_a_stage, codes.lasts
    crossing = (8 * step, -8 * step)  # from a unit to itself on a neighbouring stage; nothing else is that far away
    order: list[int] = []
    done = bytearray(8 * num_indices)
    position = [0] * len(rows)
    sleeping: defaultdict[int, list[int]] = defaultdict(list)
    awake = deque(range(len(rows)))
    while awake:
        rank = awake.popleft()
        row = rows[rank]
        start = position[rank]
        for place in range(start, len(row)):
            code = row[place]
            if code & 7 <= W:
                missing = -1
                for needed in needs(code, num_indices, step, lasts):
                    if not done[needed]:
                        missing = needed
                        break
                    if needed - code in crossing and not done[sent_by.get(needed, needed)]:
                        missing = sent_by[needed]
                        break
                if missing >= 0:
                    sleeping[missing].append(rank)
                    position[rank] = place
                    break
            done[code] = 1
            if code in sleeping:
                awake.extend(sleeping.pop(code))
        else:
            position[rank] = len(row)
        order += row[start : position[rank]]
    if sleeping:
        raise _stall(rows, position, sleeping, codes, sent_by)
    return order


def _stall(
    rows: Sequence[Sequence[int]],
    position: Sequence[int],
    sleeping: Mapping[int, list[int]],
    codes: Codes,
    sent_by: Mapping[int, int],
) -> PlanError:
    missing = {rank: sent_by.get(code, code) for code, ranks in sleeping.items() for rank in ranks}
    waits = [
        f"rank {rank} waits at {codes.decode(rows[rank][position[rank]])} for {codes.decode(code)}"
        for rank, code in sorted(missing.items())
    ]
    finished = [f"rank {rank} is done" for rank in range(len(rows)) if rank not in missing]
    first = min(missing)
    return PlanError("the plan stalls: " + "; ".join(waits + finished), rows, codes, first, position[first])
