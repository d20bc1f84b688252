"""How far the flagship schedule is from its formula: every p to 8, k from p to 16, m to 8, v in 1, 2, 4, j in 1, 2.

Run with `python -m benchmarks.schedule_family`; it takes some minutes and needs no torch. For each ratio of times it
prints the largest excess of the simulated bubble over the formula of `docs/schedules.md`, as a share of
(p-1)T/(vk), and every setting where that is above 5 %.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product

from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import simulate
from lightning_seq1f1b.schedule.unit_times import UnitTimes

RATIOS = {
    "equal": (1, 1, 1),
    "8B model, 32K tokens": (3, 5, 2),
    "8B model, 128K tokens": (4, 7, 1),
    "LoRA": (1, 1, 0),
    "recomputation": (1, 2, 1),
}
LIMIT = 0.05


def settings() -> Iterator[tuple[int, int, int, int, int]]:
    """(p, k, m, v, j)."""
    for p in range(2, 9):
        yield from product((p,), range(p, 17), range(2, 9), (1, 2, 4), (1, 2))


def excess(p: int, k: int, m: int, v: int, j: int, ratio: tuple[int, int, int]) -> float:
    """Bubble minus formula over (p-1)T, all in units; stops at a bubble below the lower bound."""
    forward, input_grad, weight_grad = ratio
    times = UnitTimes(*(((time,) * k,) * (p * v) for time in ratio))
    plan = make_plan("interleaved_seq1f1b_zb", p, m, k, virtual_stages=v, memory_knob=j, times=times)
    bubble = simulate(plan, times).bubble
    assert bubble >= (p - 1) * forward, "below the lower bound"
    formula = (p - 1) * max(forward, forward + input_grad - j * weight_grad)
    return float(bubble - formula) / ((p - 1) * sum(ratio))


def main() -> None:
    """Print the table."""
    for name, ratio in RATIOS.items():
        found = {each: excess(*each, ratio) for each in settings()}
        beyond = {each: share for each, share in found.items() if share > LIMIT}
        print(
            f"{name} {':'.join(map(str, ratio))}: {len(found)} settings, largest excess {max(found.values()):.1%}, "
            f"{len(beyond)} beyond {LIMIT:.0%}",
            flush=True,
        )
        for (p, k, m, v, j), share in sorted(beyond.items()):
            print(f"    p={p} k={k} m={m} v={v} j={j}: {share:.1%}")


if __name__ == "__main__":
    sys.exit(main())
