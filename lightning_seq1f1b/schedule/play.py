"""Plays compute orders against the clock: when every action starts and ends, and where the weight gradients go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from lightning_seq1f1b.schedule.codes import Codes, F, I, W
from lightning_seq1f1b.schedule.dependencies import needs
from lightning_seq1f1b.schedule.timeline import Time
from lightning_seq1f1b.schedule.unit_times import StepTimes, UnitTimes

Played: TypeAlias = tuple[int, int, Time, Time]
"""One compute action of a play: rank, code, start, end."""


@dataclass(frozen=True)
class Play:
    """How the ranks have run.

    Attributes:
        actions: what was run, in an order in which the ranks could run it one at a time.
        peaks: the most units that every rank held at once, from F to the end of B, or of W.
        waiting: the code that each rank waits for in vain; empty when all are done.
    """

    actions: list[Played]
    peaks: list[int]
    waiting: dict[int, int]


class Durations(NamedTuple):
    """Times by kind (F, B, I, W) and by index of the unit on its stage, as `Codes` numbers them."""

    forward: Sequence[Time]
    backward: Sequence[Time]
    input_grad: Sequence[Time]
    weight_grad: Sequence[Time]


def expand(times: StepTimes, codes: Codes) -> Durations:
    """Times by index.

    Args:
        times: what units take.
        codes: the numbering.

    Raises:
        ValueError: if they are of fewer stages, chunks or microbatches than the numbering.
    """
    each = [times] * codes.num_microbatches if isinstance(times, UnitTimes) else times
    if len(each) != codes.num_microbatches:
        raise ValueError(f"times of {len(each)} microbatches were given for {codes.chunks_in_words}")

    def spread(kind: str) -> list[Time]:
        tables = [(getattr(one, kind), count) for one, count in zip(each, codes.chunks, strict=True)]
        if any(len(table) < codes.num_stages or min(map(len, table)) < count for table, count in tables):
            raise ValueError(
                f"{kind} must have the times of {codes.chunks_in_words} on {codes.num_stages} stages, and has fewer"
            )
        return [time for stage in range(codes.num_stages) for table, count in tables for time in table[stage][:count]]

    forward, input_grad, weight_grad = map(spread, ("forward", "input_grad", "weight_grad"))
    backward = [first + second for first, second in zip(input_grad, weight_grad, strict=True)]
    return Durations(forward, backward, input_grad, weight_grad)


def play(
    rows: Sequence[Sequence[int]],
    stage_to_rank: Sequence[int],
    codes: Codes,
    durations: Durations,
    latency: Time = 0,
    *,
    early: bool = False,
) -> Play:
    """Run compute orders, in time linear in their actions up to a logarithm of the number of ranks.

    Every rank runs its actions in order, each as soon as what it needs is there: at once from the same rank, `latency`
    after its end from another one.

    Args:
        rows: codes of every rank's compute actions, in order.
        stage_to_rank: the rank of every stage.
        codes: the numbering.
        durations: times of the actions.
        latency: how long a transfer takes.
        early: whether a rank that would wait runs the oldest W that is due instead, before its place.
    """
    kind = _WithEarlyWeightGrads if early else _InOrder
    return kind(rows, stage_to_rank, codes, durations, latency).run()


def fill_gaps(
    rows: Sequence[Sequence[int]],
    stage_to_rank: Sequence[int],
    codes: Codes,
    durations: Durations,
    cap: int | None,
    *,
    patient: bool,
) -> Play:
    """Run orders of F and I, and put the weight gradients where the ranks would wait.

    After its I, each W stands in a queue. A rank runs the oldest when its next action lacks its data, when its next F
    would hold more than `cap` units, and at the end.

    Args:
        rows: codes of every rank's F and I, in order.
        stage_to_rank: the rank of every stage.
        codes: the numbering.
        durations: times of the actions.
        cap: most units a rank may hold; None for no limit.
        patient: whether a rank rather waits than begins a W that ends after the data of its next action is there.
    """
    return _FillingGaps(rows, stage_to_rank, codes, durations, cap, patient).run()


class Clock(ABC):
    """The state of all ranks of a play; subclasses say what a free rank does next.

    Args:
        num_ranks: ranks that play.
        stage_to_rank: the rank of every stage.
        codes: the numbering.
        durations: times of the actions.
        latency: how long a transfer takes.
    """

    def __init__(
        self, num_ranks: int, stage_to_rank: Sequence[int], codes: Codes, durations: Durations, latency: Time
    ) -> None:
        self.crosses = [here != there for here, there in pairwise(stage_to_rank)]
        self.num_indices, self.step, self.lasts = codes.num_indices, codes.units_on_a_stage, codes.lasts
        self.durations, self.latency = durations, latency
        self.ends: list[Time | None] = [None] * (8 * codes.num_indices)
        self.owed: list[deque[int]] = [deque() for _ in range(num_ranks)]
        self.held = [0] * num_ranks
        self.peaks = [0] * num_ranks
        self.free_at: list[Time] = [0] * num_ranks
        self.sleeping: defaultdict[int, list[int]] = defaultdict(list)
        self.agenda: list[tuple[Time, int]] = []
        self.turn: list[Time | None] = [None] * num_ranks  # when each comes next; other entries of the agenda are void
        self.actions: list[Played] = []

    @abstractmethod
    def go_on(self, rank: int, now: Time) -> None:
        """Let a rank that is free at `now` run until it waits, or until another rank's turn comes first."""

    def run(self) -> Play:
        """Play until nobody can go on."""
        for rank in range(len(self.turn)):
            self.wake(rank, 0)
        while self.agenda:
            now, rank = heappop(self.agenda)
            if self.turn[rank] == now:
                self.turn[rank] = None
                self.go_on(rank, now)
        waiting = {rank: code for code, ranks in self.sleeping.items() for rank in ranks}
        return Play(self.actions, self.peaks, waiting)

    def wake(self, rank: int, time: Time) -> None:
        """Give an idle rank its turn at `time`, unless it comes earlier anyway."""
        turn = self.turn[rank]
        if turn is None or time < turn:
            self.turn[rank] = time
            heappush(self.agenda, (time, rank))

    def others_first(self, rank: int, now: Time) -> bool:
        """Whether another rank's turn comes before `now`: what a rank finds then depends on what that one begins."""
        if self.agenda and self.agenda[0][0] < now:
            self.wake(rank, now)
            return True
        return False

    def ready(self, code: int) -> tuple[Time, int | None]:
        """When everything that an action needs is there; or what of it has not begun yet."""
        ends, step = self.ends, self.step
        ready: Time = 0
        for needed in needs(code, self.num_indices, step, self.lasts):
            end = ends[needed]
            if end is None:
                return 0, needed
            crossing = self.latency and needed - code in (8 * step, -8 * step)
            if crossing and self.crosses[(min(needed, code) >> 3) // step]:
                end += self.latency
            if end > ready:
                ready = end
        return ready, None

    def run_action(self, rank: int, code: int, start: Time) -> Time:
        """Run an action of a row; returns its end."""
        kind = code & 7
        end = start + self.durations[kind][code >> 3]
        self.ends[code] = self.free_at[rank] = end
        self.actions.append((rank, code, start, end))
        if kind == F:
            self.held[rank] += 1
            if self.held[rank] > self.peaks[rank]:
                self.peaks[rank] = self.held[rank]
        elif kind == I:
            self.owed[rank].append(code - I + W)
        else:
            self.held[rank] -= 1
        if code in self.sleeping:
            for waiting in self.sleeping.pop(code):
                if waiting != rank:
                    self.wake(waiting, max(self.free_at[waiting], start))
        return end

    def run_weight_grad(self, rank: int, now: Time) -> Time:
        """Run the oldest W of a rank; returns its end."""
        code = self.owed[rank].popleft()
        end = self.free_at[rank] = now + self.durations.weight_grad[code >> 3]
        self.actions.append((rank, code, now, end))
        self.held[rank] -= 1
        return end


class _InOrder(Clock):
    """Every rank runs its actions in a given order."""

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        stage_to_rank: Sequence[int],
        codes: Codes,
        durations: Durations,
        latency: Time,
    ) -> None:
        super().__init__(len(rows), stage_to_rank, codes, durations, latency)
        self.rows = rows
        self.position = [0] * len(rows)

    def go_on(self, rank: int, now: Time) -> None:
        row, position = self.rows[rank], self.position[rank]
        while position < len(row):
            code = row[position]
            ready, missing = self.ready(code)
            if missing is not None:
                self.sleeping[missing].append(rank)
                break
            now = self.run_action(rank, code, max(now, ready))
            position += 1
        self.position[rank] = position


class _WithEarlyWeightGrads(_InOrder):
    """Every rank runs its actions in a given order, but a weight gradient that is due while it would wait."""

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        stage_to_rank: Sequence[int],
        codes: Codes,
        durations: Durations,
        latency: Time,
    ) -> None:
        super().__init__(rows, stage_to_rank, codes, durations, latency)
        self.early = [0] * len(rows)

    def go_on(self, rank: int, now: Time) -> None:
        row, owed = self.rows[rank], self.owed[rank]
        while self.position[rank] < len(row):
            code = row[self.position[rank]]
            if code & 7 == W:
                self.position[rank] += 1
                if self.early[rank]:
                    self.early[rank] -= 1
                else:
                    now = self.run_weight_grad(rank, now)
            else:
                ready, missing = self.ready(code)
                if owed and (missing is not None or ready > now):
                    self.early[rank] += 1
                    now = self.run_weight_grad(rank, now)
                elif missing is not None:
                    self.sleeping[missing].append(rank)
                    return
                else:
                    now = self.run_action(rank, code, max(now, ready))
                    self.position[rank] += 1
            if self.others_first(rank, now):
                return


class _FillingGaps(_InOrder):
    """Every rank runs its forwards and backwards in a given order, and weight gradients between them."""

    def __init__(
        self,
        rows: Sequence[Sequence[int]],
        stage_to_rank: Sequence[int],
        codes: Codes,
        durations: Durations,
        cap: int | None,
        patient: bool,
    ) -> None:
        super().__init__(rows, stage_to_rank, codes, durations, 0)
        self.cap, self.patient = cap, patient

    def go_on(self, rank: int, now: Time) -> None:
        row, owed = self.rows[rank], self.owed[rank]
        while self.position[rank] < len(row):
            code = row[self.position[rank]]
            full = self.cap is not None and code & 7 == F and self.held[rank] >= self.cap
            ready, missing = self.ready(code)
            if owed and (full or missing is not None or self.fits(owed[0], now, ready)):
                now = self.run_weight_grad(rank, now)
            elif full or missing is not None:
                self.sleeping[code if missing is None else missing].append(rank)
                return
            else:
                now = self.run_action(rank, code, max(now, ready))
                self.position[rank] += 1
            if self.others_first(rank, now):
                return
        while owed:
            now = self.run_weight_grad(rank, now)

    def fits(self, weight_grad: int, now: Time, ready: Time) -> bool:
        """Whether a weight gradient may run until the next action is ready."""
        if self.patient:
            return now < ready and now + self.durations.weight_grad[weight_grad >> 3] <= ready
        return now < ready
