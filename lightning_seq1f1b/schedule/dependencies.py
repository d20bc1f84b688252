"""What must have happened before a compute action: stated here once, read by whoever orders, checks or times a plan."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.codes import B, Codes, F, I, W


def dependencies(action: Action, codes: Codes) -> tuple[Action, ...]:
    """The compute actions that must end before `action` starts; see `needs`.

    Raises:
        ValueError: if `action` does not compute.
    """
    if not action.computes:
        raise ValueError(f"dependencies are stated for compute actions, not for {action}")
    return codes.decode_row(needs(codes.encode(action), codes.num_indices, codes.units_on_a_stage, codes.lasts))


def needs(code: int, num_indices: int, units_on_a_stage: int, lasts: Sequence[int]) -> list[int]:
    """The codes of the compute actions that must end before a compute action starts.

    - F(s, i, c) needs F(s - 1, i, c), its input, and F(s, i, c - 1), whose keys and values it reads: the KV edge.
    - B(s, i, c) needs B(s + 1, i, c), its output gradient; B(s, i, c + 1), which leaves the gradients of the keys and
      values that chunk c wrote: the KV edge of the backward; and F(s, i, k - 1), the last forward that read them, where
      k is how many chunks microbatch i has.
    - I(s, i, c), the half of B that gives the input gradient, needs the same, with I in the place of B.
    - W(s, i, c), the other half, needs I(s, i, c).

    Args:
        code: the action, as `Codes` numbers it.
        num_indices: `Codes.num_indices`.
        units_on_a_stage: `Codes.units_on_a_stage`.
        lasts: `Codes.lasts`.

    Returns:
        At most one action of another stage, and that one first.
    """
    index, kind = code >> 3, code & 7
    found = []
    if kind == F:
        if index >= units_on_a_stage:
            found.append(code - 8 * units_on_a_stage)
        if lasts[index - 1] == lasts[index]:
            found.append(code - 8)
    elif kind == W:
        found.append(code - W + I)
    else:
        assert kind in (B, I), "dependencies are stated for compute actions"
        if index + units_on_a_stage < num_indices:
            found.append(code + 8 * units_on_a_stage)
        last = lasts[index]
        if index < last:
            found.append(code + 8)
        found.append(8 * last + F)
    return found
