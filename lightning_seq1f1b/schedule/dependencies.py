"""What must have happened before a compute action: stated here once, read by whoever orders, checks or times a plan."""

from __future__ import annotations

from lightning_seq1f1b.schedule.actions import Action, Kind, Unit


def dependencies(action: Action, num_stages: int, num_chunks: int) -> tuple[Action, ...]:
    """The compute actions that must end before `action` starts.

    - F(s, i, c) needs F(s - 1, i, c), its input, and F(s, i, c - 1), whose keys and values it reads: the KV edge.
    - B(s, i, c) needs B(s + 1, i, c), its output gradient; B(s, i, c + 1), which leaves the gradients of the keys and
      values that chunk c wrote: the KV edge of the backward; and F(s, i, k - 1), the last forward that read them.

    Raises:
        ValueError: if `action` does not compute, or is half a backward.
    """
    kind, stage, unit = action.kind, action.stage, action.unit
    needed = []
    if kind is Kind.F:
        if stage > 0:
            needed.append(Action(Kind.F, stage - 1, unit))
        if unit.chunk > 0:
            needed.append(Action(Kind.F, stage, Unit(unit.microbatch, unit.chunk - 1)))
    elif kind is Kind.B:
        if stage + 1 < num_stages:
            needed.append(Action(Kind.B, stage + 1, unit))
        if unit.chunk + 1 < num_chunks:
            needed.append(Action(Kind.B, stage, Unit(unit.microbatch, unit.chunk + 1)))
        needed.append(Action(Kind.F, stage, Unit(unit.microbatch, num_chunks - 1)))
    else:
        raise ValueError(f"dependencies are stated for F and B, not for {action}")
    return tuple(needed)
