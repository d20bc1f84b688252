"""One order of all ranks' actions in which each finds what it waits for, or the stall that leaves none."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.plan_error import PlanError


def global_order(
    rows: Sequence[Sequence[Action]], waits_for: Mapping[Action, Sequence[Action]]
) -> list[tuple[int, Action]]:
    """Run all ranks together until they are done.

    Every rank takes its actions in order. Sends do not block, receives are posted in order and do not block, and a
    compute action waits for its data. Takes time linear in the number of actions.

    Args:
        rows: all actions of every rank, in order.
        waits_for: what must be done before each action, as in `requirements`.

    Returns:
        (rank, action) for every action: each rank's actions in its own order, and none before what it waits for.

    Raises:
        PlanError: if the ranks wait for each other; says what each of them waits for.
    """
    order: list[tuple[int, Action]] = []
    done: set[Action] = set()
    position = [0] * len(rows)
    sleeping: defaultdict[Action, list[int]] = defaultdict(list)
    awake = deque(range(len(rows)))
    while awake:
        rank = awake.popleft()
        row = rows[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            missing = next((needed for needed in waits_for[action] if needed not in done), None)
            if missing is not None:
                sleeping[missing].append(rank)
                break
            order.append((rank, action))
            done.add(action)
            position[rank] += 1
            awake.extend(sleeping.pop(action, ()))
    if sleeping:
        raise _stall(rows, position, sleeping)
    return order


def _stall(
    rows: Sequence[Sequence[Action]], position: Sequence[int], sleeping: Mapping[Action, list[int]]
) -> PlanError:
    missing = {rank: action for action, ranks in sleeping.items() for rank in ranks}
    waits = [
        f"rank {rank} waits at {rows[rank][position[rank]]} for {action}" for rank, action in sorted(missing.items())
    ]
    finished = [f"rank {rank} is done" for rank in range(len(rows)) if rank not in missing]
    first = min(missing)
    return PlanError("the plan stalls: " + "; ".join(waits + finished), rows, first, position[first])
