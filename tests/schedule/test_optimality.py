"""A constraint solver, told only the dependencies and the memory, finds nothing shorter than our plans."""

from itertools import pairwise

import pytest

from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import simulate
from lightning_seq1f1b.schedule.unit_times import UnitTimes

cp_model = pytest.importorskip("ortools.sat.python.cp_model", reason="needs OR-tools, of the extra test")


def shortest_makespan(
    p: int, v: int, chunks: tuple[int, ...], times: tuple[int, int, int], split: bool, cap: int, horizon: int
) -> int:
    """The proven optimum over all orders on all ranks; the model restates the dependencies, and reads no plan."""
    model = cp_model.CpModel()
    stages = range(p * v)
    length = {"F": times[0], "B": times[1] if split else times[1] + times[2]}
    if split:
        length["W"] = times[2]
    start = {
        (kind, s, i, c): model.new_int_var(0, horizon - length[kind], "")
        for kind in length
        for s in stages
        for i, k in enumerate(chunks)
        for c in range(k)
    }
    makespan = model.new_int_var(0, horizon, "")

    def end(kind: str, s: int, i: int, c: int):
        return start[kind, s, i, c] + length[kind]

    for (kind, s, i, c), begin in start.items():
        model.add(end(kind, s, i, c) <= makespan)
        if kind == "F":
            before = [("F", s - 1, i, c)] * (s > 0) + [("F", s, i, c - 1)] * (c > 0)
        elif kind == "B":
            k = chunks[i]
            before = [("B", s + 1, i, c)] * (s + 1 < p * v) + [("B", s, i, c + 1)] * (c + 1 < k) + [("F", s, i, k - 1)]
        else:
            before = [("B", s, i, c)]
        for other in before:
            model.add(begin >= end(*other))
    for rank in range(p):
        mine = [key for key in start if key[1] % p == rank]
        model.add_no_overlap([model.new_fixed_size_interval_var(start[key], length[key[0]], "") for key in mine])
        lives = []
        for _, s, i, c in (key for key in mine if key[0] == "F"):
            size = model.new_int_var(0, horizon, "")
            lives.append(model.new_interval_var(start["F", s, i, c], size, end("W" if split else "B", s, i, c), ""))
        model.add_cumulative(lives, [1] * len(lives), cap)
    for s in stages:  # of microbatches that are alike the order is free
        for i, (k, following) in enumerate(pairwise(chunks)):
            if k == following:
                model.add(start["F", s, i, 0] <= start["F", s, i + 1, 0])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = 120
    solver.parameters.num_workers = 2
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


@pytest.mark.parametrize(
    ("schedule", "p", "chunks", "v", "times", "cap"),
    [
        ("seq1f1b", 3, (3, 3), 1, (2, 2, 2), 5),
        ("seq1f1b", 3, (3, 3), 1, (2, 2, 2), 4),
        ("seq1f1b", 3, (4, 1, 1), 1, (2, 2, 2), 6),
        ("seq1f1b_zb", 3, (3, 3), 1, (2, 2, 2), 4),
        ("seq1f1b_zb", 3, (3, 3), 1, (3, 5, 2), 7),  # where the formula asks for more weight gradients than there are
        ("seq1f1b_zb", 3, (3, 2, 1), 1, (2, 2, 2), 5),
        ("interleaved_seq1f1b_zb", 2, (4, 4), 2, (1, 1, 1), 9),
        ("interleaved_seq1f1b", 2, (3, 2, 1), 2, (1, 1, 1), 7),
    ],
)
def test_nothing_is_shorter(
    schedule: str, p: int, chunks: tuple[int, ...], v: int, times: tuple[int, int, int], cap: int
) -> None:
    units = UnitTimes(*(((time,) * max(chunks),) * (p * v) for time in times))
    knob = 2 if cap > v * max(chunks) + p - 1 else 1
    plan = make_plan(
        schedule, p, len(chunks), chunks, virtual_stages=v, memory_knob=knob, activation_cap=cap, times=units
    )
    ours = simulate(plan, units)
    assert max(ours.peak_units) <= cap
    assert ours.makespan == shortest_makespan(p, v, chunks, times, plan.splits_backward, cap, int(ours.makespan))
