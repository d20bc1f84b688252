"""Exact splits of layers over stages: for equal layers, for one stage on a rank, and for any by branch and bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations, pairwise

from lightning_seq1f1b.schedule.costs import PartCosts

_BUDGET = 60_000
"""Partial splits that branch and bound looks at before it takes the best found, about a quarter of a second."""

_SAME = 1 + 1e-9
"""Loads, sums of floats, that differ by less than this factor are the same."""


@dataclass(frozen=True)
class Balance:
    """How good a split is.

    Attributes:
        heaviest_rank: cost of the rank with most work.
        heaviest_stage: cost of the stage with most work.
        unevenness: sum of the squares of the ranks' costs.
    """

    heaviest_rank: float
    heaviest_stage: float
    unevenness: float

    @classmethod
    def of(cls, parts: PartCosts, layers: Sequence[int], num_ranks: int) -> Balance:
        """The balance of a split with these numbers of layers; stage s is on rank s % num_ranks."""
        sums = (0.0, *accumulate(parts.layers))
        stages = [sums[stop] - sums[start] for start, stop in pairwise((0, *accumulate(layers)))]
        stages[0] += parts.embedding
        stages[-1] += parts.head
        ranks = [sum(stages[rank::num_ranks]) for rank in range(num_ranks)]
        return cls(max(ranks), max(stages), sum(load * load for load in ranks))

    def better_than(self, other: Balance) -> bool:
        """Whether the heaviest rank is lighter; or as heavy, and the heaviest stage is; and so on, but for rounding."""
        for mine, theirs in (
            (self.heaviest_rank, other.heaviest_rank),
            (self.heaviest_stage, other.heaviest_stage),
            (self.unevenness, other.unevenness),
        ):
            if mine * _SAME < theirs or theirs * _SAME < mine:
                return mine < theirs
        return False


def split_uniform(parts: PartCosts, num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The best split of layers of equal cost.

    Giving each layer to the rank that is then least loaded makes the heaviest rank as light as can be. With that as
    the limit of every rank, the smallest limit of a stage is found under which all layers still find a place, and then
    the layers are given out again within both limits. Later ranks and stages come first when loads are equal.
    """
    one, count, stages = parts.layers[0], len(parts.layers), num_ranks * virtual_stages
    extra = [0.0] * stages
    extra[0] += parts.embedding
    extra[-1] += parts.head
    free = _give_out(one, count, extra, num_ranks, None, None)
    assert free is not None, "without limits every layer finds a place"
    rank_limit = Balance.of(parts, free, num_ranks).heaviest_rank
    for stage_limit in sorted({number * one + more for number in range(1, count + 1) for more in extra}):
        layers = _give_out(one, count, extra, num_ranks, rank_limit * _SAME, stage_limit * _SAME)
        if layers is not None:
            return layers
    return free


def _give_out(
    one: float, count: int, extra: Sequence[float], num_ranks: int, rank_limit: float | None, stage_limit: float | None
) -> tuple[int, ...] | None:
    """Give `count` layers of cost `one` to the least loaded ranks, within limits; None when they do not fit."""
    layers = [1] * len(extra)
    extra_of_rank = [sum(extra[rank::num_ranks]) for rank in range(num_ranks)]
    on_rank = [len(extra) // num_ranks] * num_ranks

    def stage_load(stage: int, more: int = 0) -> float:
        return (layers[stage] + more) * one + extra[stage]

    if stage_limit is not None and max(map(stage_load, range(len(extra)))) > stage_limit:
        return None
    open_ranks = set(range(num_ranks))
    for _ in range(count - len(extra)):
        while True:
            if not open_ranks:
                return None
            rank = min(open_ranks, key=lambda rank: ((on_rank[rank] + 1) * one + extra_of_rank[rank], -rank))
            stage = min(range(rank, len(extra), num_ranks), key=lambda stage: (stage_load(stage), -stage))
            too_much = rank_limit is not None and (on_rank[rank] + 1) * one + extra_of_rank[rank] > rank_limit
            if too_much or (stage_limit is not None and stage_load(stage, 1) > stage_limit):
                open_ranks.discard(rank)
                continue
            break
        layers[stage] += 1
        on_rank[rank] += 1
    return tuple(layers)


def split_in_order(parts: PartCosts, num_stages: int) -> tuple[int, ...]:
    """The best split over stages that are all on ranks of their own, by dynamic programming over (stage, layer)."""
    count = len(parts.layers)
    sums = (0.0, *accumulate(parts.layers))

    def load(stage: int, start: int, stop: int) -> float:
        extra = (parts.embedding if stage == 0 else 0.0) + (parts.head if stage == num_stages - 1 else 0.0)
        return sums[stop] - sums[start] + extra

    # heaviest[start]: the lightest that the heaviest of the stages from `stage` on can be, if the first starts there.
    heaviest = [load(num_stages - 1, start, count) for start in range(count)]
    for stage in range(num_stages - 2, -1, -1):
        behind = num_stages - 1 - stage
        heaviest = [
            min(
                (max(load(stage, start, stop), heaviest[stop]) for stop in range(start + 1, count - behind + 1)),
                default=float("inf"),
            )
            for start in range(count - behind)
        ]
    limit = heaviest[0] * _SAME
    # Among the splits within the limit, the one whose squares add up to least: (sum, layers of the stages so far).
    reached: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        behind = num_stages - 1 - stage
        for start, (squares, layers) in reached.items():
            for stop in range(start + 1, count - behind + 1) if behind else (count,):
                cost = load(stage, start, stop)
                if cost > limit:
                    break
                candidate = squares + cost * cost
                if stop not in after or candidate * _SAME < after[stop][0]:
                    after[stop] = candidate, (*layers, stop - start)
        reached = after
    return reached[count][1]


def split_different(parts: PartCosts, num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The best split of layers of different cost over several stages on each rank, by branch and bound.

    It starts from the better of two splits, one with equal numbers of layers and one with stages of equal cost, both
    improved by moving one or two cuts as long as that helps. From there partial splits are extended stage by stage, the
    most even ones first, and dropped when they cannot become better. When the budget is used up, the best split so far
    is improved once more and taken.
    """
    mean = sum(parts.layers) / len(parts.layers)
    counts = PartCosts((mean,) * len(parts.layers), parts.embedding, parts.head)
    starts = (
        split_uniform(counts, num_ranks, virtual_stages),
        split_in_order(PartCosts(parts.layers), num_ranks * virtual_stages),
    )
    best = _best_of(parts, num_ranks, *(_improved(parts, start, num_ranks) for start in starts))
    return _improved(parts, _BranchAndBound(parts, num_ranks, virtual_stages, best).run(), num_ranks)


def _best_of(parts: PartCosts, num_ranks: int, *splits: tuple[int, ...]) -> tuple[int, ...]:
    best, balance = splits[0], Balance.of(parts, splits[0], num_ranks)
    for split in splits[1:]:
        other = Balance.of(parts, split, num_ranks)
        if other.better_than(balance):
            best, balance = split, other
    return best


def _improved(parts: PartCosts, layers: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """The end of a descent that moves one or two cuts by a layer as long as that helps."""
    best, balance = layers, Balance.of(parts, layers, num_ranks)
    improved = True
    while improved:
        improved = False
        for other in _moves(best):
            other_balance = Balance.of(parts, other, num_ranks)
            if other_balance.better_than(balance):
                best, balance, improved = other, other_balance, True
                break
    return best


def _moves(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Splits with one cut elsewhere by a layer, then with two."""
    shifts = [(cut, step) for cut in range(1, len(layers)) for step in (-1, 1)]
    pairs = (pair for pair in combinations(shifts, 2) if pair[0][0] != pair[1][0])
    for shift in chain(zip(shifts), pairs):
        moved = list(layers)
        for cut, step in shift:
            moved[cut - 1] += step
            moved[cut] -= step
        if min(moved) >= 1:
            yield tuple(moved)


class _BranchAndBound:
    def __init__(self, parts: PartCosts, num_ranks: int, virtual_stages: int, best: tuple[int, ...]) -> None:
        self.parts, self.num_ranks, self.num_stages = parts, num_ranks, num_ranks * virtual_stages
        self.sums = (0.0, *accumulate(parts.layers))
        self.best, self.balance = best, Balance.of(parts, best, num_ranks)
        self.loads = [0.0] * num_ranks
        self.loads[0] += parts.embedding
        self.loads[-1] += parts.head
        self.least = sum(self.loads, self.sums[-1]) / num_ranks
        self.layers: list[int] = []
        self.left = _BUDGET

    def run(self) -> tuple[int, ...]:
        self._extend(0, self.least)
        return self.best

    def _extend(self, start: int, heaviest_rank: float) -> None:
        """Try all next stages behind layer `start`; no split of those so far has a lighter heaviest rank than that."""
        stage, count = len(self.layers), len(self.parts.layers)
        if stage == self.num_stages:
            balance = Balance.of(self.parts, self.layers, self.num_ranks)
            if balance.better_than(self.balance):
                self.best, self.balance = tuple(self.layers), balance
            return
        rank, behind = stage % self.num_ranks, self.num_stages - 1 - stage
        stops = range(start + 1, count - behind + 1) if behind else (count,)
        even = (count - start) / (behind + 1)
        for stop in sorted(stops, key=lambda stop: abs(stop - start - even)):
            self.left -= 1
            if self.left < 0:
                return
            cost = self.sums[stop] - self.sums[start]
            heavier = max(heaviest_rank, self.loads[rank] + cost)
            if not self._can_improve(heavier, cost + self._extra(stage)):
                continue
            self.loads[rank] += cost
            self.layers.append(stop - start)
            if self._fits(stop, stage + 1):
                self._extend(stop, heavier)
            self.layers.pop()
            self.loads[rank] -= cost

    def _extra(self, stage: int) -> float:
        return (self.parts.embedding if stage == 0 else 0.0) + (
            self.parts.head if stage == self.num_stages - 1 else 0.0
        )

    def _can_improve(self, heaviest_rank: float, stage: float) -> bool:
        """Whether a split with such a rank and such a stage can be better than the best."""
        if heaviest_rank * _SAME < self.balance.heaviest_rank:
            return True
        as_good = heaviest_rank <= self.balance.heaviest_rank * _SAME
        return as_good and stage <= self.balance.heaviest_stage * _SAME

    def _fits(self, start: int, stage: int) -> bool:
        """Whether the ranks of the stages from `stage` on can take the layers from `start` on."""
        limit = self.balance.heaviest_rank
        ranks = {behind % self.num_ranks for behind in range(stage, min(self.num_stages, stage + self.num_ranks))}
        room = sum(limit - self.loads[rank] for rank in ranks)
        return self.sums[-1] - self.sums[start] <= room + limit * 1e-9 * self.num_ranks
