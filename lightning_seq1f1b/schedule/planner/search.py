"""Finds the fastest settings that fit into memory, playing as few of them as it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from lightning_seq1f1b.schedule.balance import nearby_layers
from lightning_seq1f1b.schedule.planner.evaluation import WHOLE, Evaluation
from lightning_seq1f1b.schedule.planner.prediction import Prediction
from lightning_seq1f1b.schedule.planner.problem import Problem
from lightning_seq1f1b.schedule.planner.settings import Setting, partitions, parts, settings

CLOSE = 0.005
"""Settings that differ by less are not worth the search; real steps vary more from run to run."""

EQUAL = 0.005
"""Among settings this close to the fastest, the simplest is chosen."""

BUDGET = 1_700_000
"""What a search may spend, see `Evaluation.spent`: about seven seconds of one core."""

DEAR = 0.25
"""How much shorter a step must promise to be, as a share of it, where playing it takes the whole budget."""

REFINED = 6
"""Pairs of schedule and virtual stages whose best settings are tried with other layers and boundaries."""

REACH = (1, 2)
"""By how many layers the first, and the last stage, then change."""

Progress = Callable[[int, int], None]
"""Called with how many of how many settings have been looked at."""


class DoesNotFitError(ValueError):
    """No setting fits into the memory.

    Attributes:
        smallest: the setting that needs the least.
    """

    def __init__(self, message: str, smallest: Prediction) -> None:
        super().__init__(message)
        self.smallest = smallest


@dataclass(frozen=True)
class Ranking:
    """What a search found.

    Attributes:
        problem: what was asked.
        predictions: settings that fit, the recommended one first, then by time.
        considered: settings there are.
        too_large: those of them that do not fit into the memory.
        complete: whether every setting was played or ruled out; else the most promising ones were.
    """

    problem: Problem
    predictions: tuple[Prediction, ...]
    considered: int
    too_large: int
    complete: bool

    @property
    def best(self) -> Prediction:
        """The recommended setting."""
        return self.predictions[0]


def search(problem: Problem, budget: int = BUDGET, progress: Progress | None = None) -> Ranking:
    """Rank the settings of a problem. Every process that calls it with equal arguments gets the same answer.

    Settings are ordered by the formulas of their schedules; lower bounds on time and memory, which hold for every
    plan, rule out those that need not be played.

    Args:
        problem: what to plan.
        budget: what may be spent before the search contents itself with what it has, see `Evaluation.spent`.
        progress: told how far the search is.

    Raises:
        DoesNotFitError: when no setting fits into `problem.memory`.
        ValueError: for knobs that contradict each other or the model.
    """
    return _Search(problem, budget, progress).run()


def _by_time(found: Prediction) -> tuple[object, ...]:
    return found.seconds, found.setting.complexity, found.setting.unevenness, found.peak


def _by_simplicity(found: Prediction) -> tuple[object, ...]:
    return found.setting.complexity, found.seconds, found.setting.unevenness, found.peak


class _Search:
    REFINE_LIMIT, LIMIT = 1.25, 2.5
    """Budgets that may have been spent before nothing is refined, and before nothing is played as a whole, any more."""

    def __init__(self, problem: Problem, budget: int, progress: Progress | None) -> None:
        self.problem, self.budget, self.progress = problem, budget, progress
        self.evaluation = Evaluation(problem)
        self.everything = list(settings(problem))
        self.found: dict[Setting, Prediction] = {}
        self.played: set[Setting] = set()
        self.too_large: set[Setting] = set()

    def run(self) -> Ranking:
        queue = self._in_order()
        while True:
            complete = self._explore(queue)
            if not self.found:
                raise self._does_not_fit()
            self._refine()
            predictions = self._verified()
            if predictions:
                return Ranking(self.problem, predictions, len(self.everything), len(self.too_large), complete)

    def _explore(self, queue: Sequence[Setting]) -> bool:
        """Play settings in this order; returns whether none that may be better was left out for the budget."""
        for place, setting in enumerate(queue):
            if self.progress is not None:
                self.progress(place, len(queue))
            if setting in self.played:
                continue
            if self.evaluation.spent > self.budget and self.found:
                return False
            best = min((prediction.seconds for prediction in self.found.values()), default=inf)
            known = any(found.schedule == setting.schedule for found in self.found)
            # The first of every schedule is played in any case: the explanation compares them.
            if not known or self.evaluation.least_seconds(setting) < best * (1 - CLOSE):
                self._play(setting)
        return True

    def _refine(self) -> None:
        """Try layers and boundaries together, for the best settings of the best schedules.

        The busiest rank has least to do with the layers that were played so far. A step may still be shorter with
        others: the first stage fills the pipeline, and the last one has the head. With a few of them moved, other
        boundaries may be the best. Exact among these pairs, unless the budget ends it: none is left out but those whose
        lower bound rules them out.
        """
        problem = self.problem
        if problem.knobs.layers is not None:
            return
        best_with: dict[tuple[str, int], Prediction] = {}
        for found in sorted(self.found.values(), key=_by_time):
            best_with.setdefault((found.setting.schedule, found.setting.virtual_stages), found)
        for found in list(best_with.values())[:REFINED]:
            setting = found.setting
            nearby = nearby_layers(setting.layers, problem.num_ranks, parts(problem), REACH)
            for layers, boundary in product(nearby, partitions(problem, setting.num_chunks)):
                setting = replace(setting, layers=layers, partition=boundary)
                best = min(prediction.seconds for prediction in self.found.values())
                if self.evaluation.spent > self.REFINE_LIMIT * self.budget:
                    return
                if setting not in self.found and self.evaluation.least_seconds(setting) < best:
                    self._play(setting)

    def _in_order(self) -> list[Setting]:
        """The most promising setting of every schedule, then all others; what is dear to play must promise more."""
        fitting = []
        for setting in self.everything:
            if self.problem.memory is not None and self.evaluation.least_bytes(setting) > self.problem.memory:
                self.too_large.add(setting)
            else:
                dear = 1 + DEAR * self.evaluation.price(setting) / self.budget
                guess = dear * self.evaluation.guessed_seconds(setting)
                fitting.append((guess, setting.complexity, setting.unevenness, setting))
        fitting.sort(key=lambda entry: entry[:3])
        ordered = [setting for *_, setting in fitting]
        first_of: dict[str, Setting] = {}
        for setting in ordered:
            first_of.setdefault(setting.schedule, setting)
        firsts = set(first_of.values())
        return [*first_of.values(), *(setting for setting in ordered if setting not in firsts)]

    def _play(self, setting: Setting) -> None:
        best = min((prediction.seconds for prediction in self.found.values()), default=inf)
        self.played.add(setting)
        self._keep(setting, self.evaluation.play(setting, unless_above=best))

    def _keep(self, setting: Setting, prediction: Prediction | None) -> None:
        self.found.pop(setting, None)
        if prediction is None:
            return
        if self.problem.memory is not None and prediction.peak > self.problem.memory:
            self.too_large.add(setting)
        else:
            self.found[setting] = prediction

    def _verified(self) -> tuple[Prediction, ...]:
        """All predictions in order, the first one of them played as it will run, and as a whole where time allows.

        Empty when none is left: played as it will run, a setting may turn out to need more memory.
        """
        evaluation = self.evaluation
        while self.found:
            ranked = sorted(self.found.values(), key=_by_time)
            equal = [found for found in ranked if found.seconds <= ranked[0].seconds * (1 + EQUAL)]
            best = min(equal, key=_by_simplicity)
            verified = [found for found in ranked if found.memory is not None]
            # Another one may look a little better than it would turn out to be.
            close = bool(verified) and not best.exact and verified[0].seconds <= best.seconds * (1 + CLOSE)
            if best.memory is not None or close:
                best = best if best.memory is not None else verified[0]
                return (best, *(found for found in ranked if found is not best))
            within = evaluation.spent + evaluation.price(best.setting, whole=True) <= self.LIMIT * self.budget
            whole = within or best.exact
            played = evaluation.play(best.setting, whole=True) if whole else evaluation.with_memory(best)
            self._keep(best.setting, played)
        return ()

    def _does_not_fit(self) -> ValueError:
        """The error for a problem with no setting that fits, or with no plan for any."""
        evaluation, total = self.evaluation, self.problem.num_microbatches
        least = sorted(
            ((evaluation.least_bytes(setting), setting.complexity, setting) for setting in self.everything),
            key=lambda entry: entry[:2],
        )
        smallest: Prediction | None = None
        for place, (bound, _, setting) in enumerate(least):
            if self.progress is not None:
                self.progress(place, len(least))
            enough = evaluation.spent > self.LIMIT * self.budget
            if smallest is not None and (enough or bound >= smallest.peak * (1 - CLOSE)):
                break
            prediction = evaluation.play(setting, whole=evaluation.actions(setting, total) <= WHOLE)
            if prediction is not None and (smallest is None or prediction.peak < smallest.peak):
                smallest = prediction
        if smallest is not None:
            return DoesNotFitError("no setting fits into the memory", smallest)
        try:
            evaluation.plan(least[0][2], total)
        except ValueError as error:
            return error
        raise AssertionError("a plan was refused, and then was not")
