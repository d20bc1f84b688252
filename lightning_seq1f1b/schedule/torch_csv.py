"""A plan as CSV in the grammar of torch.distributed.pipelining, which knows microbatches but no chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from lightning_seq1f1b.schedule.actions import Action, Kind

_CONSUMER = {Kind.RECV_F: (Kind.F,), Kind.RECV_B: (Kind.B, Kind.I)}


def torch_csv(rows: Sequence[Iterable[Action]]) -> str:
    """One line for each rank, one cell for each action, such as `0F1` or `3SEND_B0`: <stage><kind><microbatch>.

    torch's `PipelineScheduleMulti` and the schedules derived from it load `plan.compute` as their format
    `compute_only`, and `plan.actions`, sends and receives included, as `compute_comms`. Receives are moved to right
    before the action that needs their data, because torch's check of a schedule counts a posted receive as waiting.

        0F0,0F1,0B0,0F2,0B1,0B2
        1F0,1B0,1F1,1B1,1F2,1B2

    Args:
        rows: actions of every rank, in order: `plan.compute`, `plan.actions`, or the order of a measured step.

    Raises:
        ValueError: if there is more than one chunk.
    """
    return "".join(",".join(map(_cell, _with_late_receives(row))) + "\n" for row in rows)


def _with_late_receives(row: Iterable[Action]) -> Iterator[Action]:
    """The row with each receive as late as it can be; those of one direction keep their order, as messages need it."""
    posted: dict[Kind, deque[Action]] = {kind: deque() for kind in _CONSUMER}
    for action in row:
        if action.kind in posted:
            posted[action.kind].append(action)
            continue
        for kind, consumers in _CONSUMER.items():
            needed = Action(kind, action.stage, action.unit)
            while action.kind in consumers and needed in posted[kind]:
                yield posted[kind].popleft()
        yield action


def _cell(action: Action) -> str:
    if action.unit.chunk > 0:
        raise ValueError(
            "torch's CSV names an action by stage, kind and microbatch; it has no place for a chunk, and here is "
            f"{action}; set num_chunks=1"
        )
    return f"{action.stage}{action.kind.value}{action.unit.microbatch}"
