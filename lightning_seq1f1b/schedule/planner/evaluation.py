"""Plays steps for the planner, and bounds what they take from below without playing them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import ceil, gcd, inf
from typing import NamedTuple

from lightning_seq1f1b.schedule.estimate import unit_sizes
from lightning_seq1f1b.schedule.memory_curve import peaks
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.planner.memory_parts import fullest_moments
from lightning_seq1f1b.schedule.planner.prediction import Memory, Prediction
from lightning_seq1f1b.schedule.planner.problem import Problem
from lightning_seq1f1b.schedule.planner.quantities import Quantities
from lightning_seq1f1b.schedule.planner.settings import Setting
from lightning_seq1f1b.schedule.simulate import Simulation, simulate
from lightning_seq1f1b.schedule.timeline import Time
from lightning_seq1f1b.schedule.unit_times import UnitTimes

Table = tuple[tuple[Time, ...], ...]

WHOLE = 8_000
"""Compute actions up to which a step is played as a whole even where its beginning would do."""

LARGE = 300_000
"""Compute actions from which the memory of a step is taken from its first microbatches, in any case."""

ORDERING = 4
"""Times that it takes longer to order and verify an action than to play it."""


class Evaluation(Quantities):
    """Predicts settings of one problem.

    Attributes:
        problem: the problem.
        spent: compute actions played so far; those that were ordered, too, count `ORDERING` times more.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._refused: set[tuple[object, ...]] = set()
        self._ordered: set[tuple[object, ...]] = set()
        self.spent = 0

    # ---- bounds ----------------------------------------------------------------------------------------------------

    def least_seconds(self, setting: Setting) -> float:
        """No step with the setting is shorter.

        A rank starts when the first chunk has passed the ranks before it, and then has all its work to do. Where the
        backward is in one piece, its last work is the backward of some chunk 0 on its first stage, which then passes
        the ranks before it on its way back.
        """
        times = self.times(setting)
        way = list(accumulate(row[0] for row in times.forward))
        if not setting.splits:
            back = accumulate(i[0] + w[0] for i, w in zip(times.input_grad, times.weight_grad, strict=True))
            way = [there + back for there, back in zip(way, back, strict=True)]
        hops = (1 if setting.splits else 2) * self.latency(setting)
        return max(
            (way[rank - 1] + rank * hops if rank else 0.0) + work for rank, work in enumerate(self.work(setting))
        )

    def guessed_seconds(self, setting: Setting) -> float:
        """About how long the step is, by the formulas of the schedules: good enough to decide what is played first."""
        problem, times = self.problem, self.times(setting)
        ranks = problem.num_ranks
        totals = [sum(map(sum, table)) for table in (times.forward, times.input_grad, times.weight_grad)]
        forward, input_grad, weight_grad = (total / ranks for total in totals)
        step = max(self.work(setting))
        per_chunk = 1 / (setting.virtual_stages * setting.num_chunks)
        if setting.splits:
            fill = max(forward, forward + input_grad - setting.knob * weight_grad)
        else:
            fill = forward + input_grad + weight_grad
        chunks = [sum(row[chunk] for table in _tables(times) for row in table) for chunk in range(setting.num_chunks)]
        # Unequal chunks meet in the steady phase, and the shorter one waits.
        uneven = (max(chunks) - min(chunks)) / ranks * problem.num_microbatches / 2
        return step + (ranks - 1) * (fill * per_chunk + 2 * self.latency(setting)) + uneven

    def work(self, setting: Setting) -> tuple[float, ...]:
        """Seconds that every rank computes in a step."""
        tables, ranks = _tables(self.times(setting)), self.problem.num_ranks
        rows = (sum(sum(map(sum, table[rank::ranks])) for table in tables) for rank in range(ranks))
        return tuple(float(row * self.problem.num_microbatches) for row in rows)

    def least_bytes(self, setting: Setting) -> float:
        """The fullest rank of a step with the setting holds no less.

        A rank warms up with a known number of forwards before its first backward, and no sequence has a backward
        anywhere before its last chunk has passed all stages.
        """
        problem, sizes = self.problem, self.sizes(setting)
        ranks, chunks = problem.num_ranks, setting.num_chunks
        most = 0.0
        for rank, (resident, working) in enumerate(zip(self.resident(setting), self.working(setting), strict=True)):
            stages = range(rank, len(setting.layers), ranks)
            row = sum(sum(sizes.activations[stage]) + sum(sizes.keys_values[stage]) for stage in stages)
            rows, units = 1, 0
            if setting.schedule == "gpipe":
                rows = problem.num_microbatches
            elif not setting.splits:
                ahead = setting.knob * (ranks - 1 - rank)
                all_ahead = (problem.num_microbatches - 1) * chunks * setting.virtual_stages
                more, units = divmod(min(ahead, all_ahead), chunks * setting.virtual_stages)
                if setting.virtual_stages == 1:
                    rows += more
                else:  # they may belong to more microbatches than necessary
                    units = min(ahead, all_ahead)
            smallest = min(min(sizes.activations[stage]) for stage in stages)
            most = max(most, resident.total + working + rows * row + units * smallest)
        return most + self.buffers(setting)

    # ---- playing ---------------------------------------------------------------------------------------------------

    def actions(self, setting: Setting, num_microbatches: int) -> int:
        """Compute actions of a step."""
        kinds = 3 if setting.splits else 2
        return kinds * len(setting.layers) * setting.num_chunks * num_microbatches

    def play(self, setting: Setting, *, whole: bool = False, unless_above: float = inf) -> Prediction | None:
        """Predict a setting; None when its plan is refused, because it would stall or be nearly serial.

        A long step is played with fewer microbatches, two numbers of them, and continued in a straight line: between
        its warm-up and its end every step repeats itself.

        Args:
            setting: what to predict.
            whole: play all microbatches, and take the memory from the order in which weight gradients then run.
            unless_above: seconds above which the length of the step is not wanted any closer: the first of the two
                plays is then continued with the work alone.
        """
        total = self.problem.num_microbatches
        fewer = () if whole or self.actions(setting, total) <= WHOLE else self._fewer(setting)
        work = self.work(setting)
        beginning = self._beginning(setting) if whole else None
        played = self._play(setting, fewer[0] if fewer else total, as_it_runs=whole and beginning is None)
        if played is None:
            return None
        if beginning is not None:
            shorter = self._play(setting, beginning, as_it_runs=True)
            if shorter is None or shorter.memory is None:
                return None
            return Prediction(setting, played.seconds, work, shorter.held, True, shorter.memory)
        if not fewer:
            return Prediction(setting, played.seconds, work, played.held, True, played.memory)
        seconds = played.seconds + (1 - fewer[0] / total) * max(work)
        if seconds > unless_above:
            return Prediction(setting, seconds, work, played.held, False)
        longer = self._play(setting, fewer[1])
        if longer is None:
            return None
        steps = (total - fewer[1]) / (fewer[1] - fewer[0])
        seconds = longer.seconds + steps * (longer.seconds - played.seconds)
        held = (after + steps * (after - before) for before, after in zip(played.held, longer.held, strict=True))
        return Prediction(setting, seconds, work, tuple(held), False)

    def with_memory(self, found: Prediction) -> Prediction | None:
        """The same prediction with the memory of the first microbatches as they run; None when that has no plan."""
        fewer = self._fewer(found.setting)
        if not fewer or found.setting.schedule == "gpipe":  # which holds more, the more microbatches there are
            return self.play(found.setting, whole=True)
        shorter = self._play(found.setting, fewer[1], as_it_runs=True)
        return shorter and replace(found, peaks=shorter.held, memory=shorter.memory)

    def price(self, setting: Setting, *, whole: bool = False) -> int:
        """What it spends at most to order a setting and to play it, as a whole or as `play` does otherwise."""
        total = self.problem.num_microbatches
        fewer = () if whole or self.actions(setting, total) <= WHOLE else self._fewer(setting)
        return (1 + ORDERING) * self.actions(setting, sum(fewer) or total)

    def _beginning(self, setting: Setting) -> int | None:
        """How many microbatches of a very long step show all its memory; None to look at all of it."""
        if self.actions(setting, self.problem.num_microbatches) < LARGE or setting.schedule == "gpipe":
            return None
        fewer = self._fewer(setting)
        return fewer[1] if fewer else None

    def _fewer(self, setting: Setting) -> tuple[int, ...]:
        """Two numbers of microbatches that show the steady phase; empty when the whole step is hardly longer."""
        ranks, total = self.problem.num_ranks, self.problem.num_microbatches
        units_of_row = setting.num_chunks * setting.virtual_stages
        # A rank's stages take turns in groups of as many units as a row has chunks, or as there are ranks.
        groups = (setting.virtual_stages - 1) * max(setting.num_chunks, ranks)
        warm_up = groups + setting.num_chunks - 1 + setting.knob * (ranks - 1)
        # Groups that are larger than a row repeat only after several rows.
        period = ranks // gcd(ranks, setting.num_chunks) if setting.num_chunks < ranks else 1
        first = ceil(warm_up / units_of_row) + 2
        first += (total - first) % period
        second = first + period
        return (first, second) if 2 * second <= total else ()

    def plan(self, setting: Setting, num_microbatches: int) -> Plan:
        """The plan of a step, as the strategy makes it.

        Raises:
            ValueError: when there is none for the setting.
        """
        return make_plan(
            setting.schedule,
            self.problem.num_ranks,
            num_microbatches,
            setting.num_chunks,
            virtual_stages=setting.virtual_stages,
            memory_knob=setting.memory_knob,
        )

    def _play(self, setting: Setting, num_microbatches: int, *, as_it_runs: bool = False) -> _Played | None:
        order = (setting.schedule, setting.virtual_stages, setting.num_chunks, setting.memory_knob)
        if order in self._refused:
            return None
        self.spent += self.actions(setting, num_microbatches)
        if (order, num_microbatches) not in self._ordered:
            self._ordered.add((order, num_microbatches))
            self.spent += ORDERING * self.actions(setting, num_microbatches)
        try:
            plan = self.plan(setting, num_microbatches)
        except ValueError:
            self._refused.add(order)
            return None
        simulation = simulate(plan, self.times(setting), self.latency(setting), early_weight_grads=True)
        memory = self._memory(setting, plan, simulation) if as_it_runs else None
        if memory is not None:
            held = tuple(rank.total for rank in memory)
        else:
            held_by_units = peaks(plan, self.sizes(setting), simulation.rows if plan.splits_backward else None)
            ranks = zip(held_by_units, self.resident(setting), self.working(setting), strict=True)
            held = tuple(units + resident.total + working + self.buffers(setting) for units, resident, working in ranks)
        return _Played(float(simulation.makespan), held, memory)

    def _memory(self, setting: Setting, plan: Plan, simulation: Simulation) -> tuple[Memory, ...]:
        """Bytes of every rank; weight gradients run when there is time for them, not where the plan has put them."""
        problem = self.problem
        headless = replace(problem.shape, vocab_size=0)
        without_logits = unit_sizes(headless, setting.layers, setting.spans(problem), problem.training)
        parts = fullest_moments(simulation.timeline, plan.num_ranks, self.sizes(setting), without_logits)
        return tuple(
            Memory(resident.weights, resident.gradients, resident.optimizer, *held, working, self.buffers(setting))
            for resident, held, working in zip(self.resident(setting), parts, self.working(setting), strict=True)
        )


class _Played(NamedTuple):
    seconds: float
    held: tuple[float, ...]
    memory: tuple[Memory, ...] | None


def _tables(times: UnitTimes) -> tuple[Table, Table, Table]:
    return times.forward, times.input_grad, times.weight_grad
