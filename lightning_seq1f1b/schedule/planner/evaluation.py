"""Plays steps for the planner, and bounds what they take from below without playing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import ceil, gcd, inf
from typing import NamedTuple

from lightning_seq1f1b.schedule.estimate import (
    Resident,
    message_seconds,
    resident_bytes,
    transient_bytes,
    unit_sizes,
    unit_times,
)
from lightning_seq1f1b.schedule.memory_curve import UnitSizes, peaks
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.planner.memory_parts import fullest_moments
from lightning_seq1f1b.schedule.planner.prediction import Memory, Prediction
from lightning_seq1f1b.schedule.planner.problem import Problem
from lightning_seq1f1b.schedule.planner.settings import Setting
from lightning_seq1f1b.schedule.simulate import Simulation, simulate
from lightning_seq1f1b.schedule.spans import Span
from lightning_seq1f1b.schedule.timeline import Time
from lightning_seq1f1b.schedule.unit_times import UnitTimes

Table = tuple[tuple[Time, ...], ...]

MESSAGES = 4
"""Messages that a rank holds at once: one each way in each direction."""

WHOLE = 8_000
"""Compute actions up to which a step is played as a whole even where its beginning would do."""


LARGE = 300_000
"""Compute actions from which the memory of a step is taken from its first microbatches, in any case."""

ORDERING = 4
"""Times that it takes longer to order and verify an action than to play it."""


class Evaluation:
    """Predicts settings of one problem; what settings have in common is computed once.

    Attributes:
        problem: the problem.
        spent: compute actions played so far; those that were ordered, too, count `ORDERING` times more.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._times = lru_cache(maxsize=None)(self._unit_times)
        self._sizes = lru_cache(maxsize=None)(self._unit_sizes)
        self._resident = lru_cache(maxsize=None)(self._resident_bytes)
        self._working = lru_cache(maxsize=None)(self._working_bytes)
        self._refused: set[tuple[object, ...]] = set()
        self._ordered: set[tuple[object, ...]] = set()
        self.spent = 0

    # ---- what units and ranks take ---------------------------------------------------------------------------------

    def times(self, setting: Setting) -> UnitTimes:
        """Seconds of its units."""
        return self._times(setting.layers, setting.spans(self.problem))

    def sizes(self, setting: Setting) -> UnitSizes:
        """Bytes of its units."""
        return self._sizes(setting.layers, setting.spans(self.problem))

    def resident(self, setting: Setting) -> Sequence[Resident]:
        """Bytes that every rank holds from step to step."""
        return self._resident(setting.layers)

    def working(self, setting: Setting) -> Sequence[float]:
        """Bytes that an action of every rank makes and frees again, at most."""
        return self._working(setting.layers, setting.spans(self.problem))

    def latency(self, setting: Setting) -> float:
        """Seconds of a message; the mean over the chunks."""
        problem, chunks = self.problem, setting.spans(self.problem)
        if problem.num_ranks == 1:
            return 0.0
        seconds = [message_seconds(problem.shape, span, problem.training, problem.machine) for span in chunks]
        return sum(seconds) / len(seconds)

    def buffers(self, setting: Setting) -> float:
        """Bytes of messages on their way, of any rank."""
        problem = self.problem
        if problem.num_ranks == 1:
            return 0.0
        longest = max(span.length for span in setting.spans(problem))
        message = problem.training.rows * longest * problem.shape.hidden_size * problem.training.activation_bytes
        return MESSAGES * message

    def _unit_times(self, layers: tuple[int, ...], spans: tuple[Span, ...]) -> UnitTimes:
        problem = self.problem
        return unit_times(problem.shape, layers, spans, problem.training, problem.machine, problem.profile)

    def _unit_sizes(self, layers: tuple[int, ...], spans: tuple[Span, ...]) -> UnitSizes:
        return unit_sizes(self.problem.shape, layers, spans, self.problem.training)

    def _resident_bytes(self, layers: tuple[int, ...]) -> Sequence[Resident]:
        return resident_bytes(self.problem.shape, layers, self._ranks(layers), self.problem.training)

    def _working_bytes(self, layers: tuple[int, ...], spans: tuple[Span, ...]) -> Sequence[float]:
        return transient_bytes(self.problem.shape, layers, spans, self._ranks(layers), self.problem.training)

    def _ranks(self, layers: tuple[int, ...]) -> list[int]:
        return [stage % self.problem.num_ranks for stage in range(len(layers))]

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
        warm_up = units_of_row - 1 + setting.knob * (ranks - 1)
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
