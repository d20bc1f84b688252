"""The settings a planner chooses from: schedule, virtual stages, chunks, their boundaries, memory knob, layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from lightning_seq1f1b.schedule.balance import balanced_layers
from lightning_seq1f1b.schedule.costs import PartCosts
from lightning_seq1f1b.schedule.estimate import part_seconds
from lightning_seq1f1b.schedule.partition import partition
from lightning_seq1f1b.schedule.planner.problem import Problem
from lightning_seq1f1b.schedule.policies import POLICIES, Policy
from lightning_seq1f1b.schedule.spans import Span
from lightning_seq1f1b.schedule.suggest import unknown

MEMORY_KNOBS: dict[str, tuple[int | None, ...]] = {
    "1f1b": (None,),
    "interleaved_1f1b": (2, 1),
    "zb1p": (1, 2),
    "seq1f1b": (None,),
    "gpipe": (None,),
    "interleaved_seq1f1b": (1, 2),
    "seq1f1b_zb": (1, 2),
    "interleaved_seq1f1b_zb": (1, 2, 3, 4),
}
"""The schedules that train, with the values of the memory knob worth trying; None is the schedule's own."""

VIRTUAL_STAGES = (2, 3, 4, 6, 8)
CHUNKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PARTITIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""From equal tokens to equal work; small kernels are less efficient, so the best often lies in between."""


@dataclass(frozen=True)
class Setting:
    """One way to run the step.

    Attributes:
        schedule: name of the schedule.
        virtual_stages: stages on each rank.
        num_chunks: chunks of every row.
        memory_knob: extra warm-up forwards for each rank behind; None for the schedule's own.
        partition: 0 for equal tokens, 1 for equal work, or the chunks' lengths.
        layers: layers of every stage.
    """

    schedule: str
    virtual_stages: int
    num_chunks: int
    memory_knob: int | None
    partition: float | tuple[int, ...]
    layers: tuple[int, ...]

    @property
    def splits(self) -> bool:
        """Whether weight gradients are computed apart from input gradients."""
        return POLICIES[self.schedule].splits_backward

    @property
    def knob(self) -> int:
        """The memory knob in effect."""
        return self.memory_knob or POLICIES[self.schedule].memory_knob or 1

    @property
    def complexity(self) -> tuple[float, ...]:
        """Orders settings of equal speed: the smallest is the simplest. Where rows are cut does not count."""
        place = list(MEMORY_KNOBS).index(self.schedule)
        return self.splits, self.virtual_stages, self.num_chunks, place, self.knob

    @property
    def unevenness(self) -> float:
        """Orders settings that differ in where rows are cut alone: even first."""
        return 0.0 if isinstance(self.partition, tuple) else self.partition

    def spans(self, problem: Problem) -> tuple[Span, ...]:
        """The chunks of a row."""
        return _spans(self.partition, problem.length, self.num_chunks, problem.shape, problem.multiple)


_spans = lru_cache(maxsize=1024)(partition)


def settings(problem: Problem) -> Iterator[Setting]:
    """Every setting that the problem's knobs leave, in a fixed order.

    Raises:
        ValueError: for knobs that contradict each other or the model.
    """
    asked = problem.knobs.schedule
    if asked is not None and asked not in MEMORY_KNOBS:
        raise ValueError(unknown("schedule", asked, MEMORY_KNOBS))
    found = False
    for name in MEMORY_KNOBS if asked is None else (asked,):
        policy = POLICIES[name]
        for virtual_stages in _virtual_stages(problem, policy):
            layers = _layers(problem, virtual_stages)
            for num_chunks in _chunks(problem, policy):
                for boundary in partitions(problem, num_chunks):
                    for memory_knob in _memory_knobs(problem, name):
                        found = True
                        yield Setting(name, virtual_stages, num_chunks, memory_knob, boundary, layers)
    if not found:
        raise ValueError(_contradiction(problem))


def _virtual_stages(problem: Problem, policy: Policy) -> tuple[int, ...]:
    most = problem.shape.num_layers // problem.num_ranks
    asked = problem.knobs.virtual_stages
    if asked is None and problem.knobs.layers is not None:
        asked = len(problem.knobs.layers) // problem.num_ranks
    if asked is not None:
        if asked < 1:
            raise ValueError(f"virtual_stages must be at least 1, not {asked}")
        if asked > most:
            raise ValueError(
                f"virtual_stages={asked} on {problem.num_ranks} ranks makes {asked * problem.num_ranks} stages, but "
                f"the model has {problem.shape.num_layers} layers; set virtual_stages to {most} or less"
            )
        return (asked,) if (asked > 1) == policy.interleaves else ()
    if not policy.interleaves:
        return (1,)
    # With one rank there is no bubble to shrink.
    return tuple(number for number in VIRTUAL_STAGES if number <= most) if problem.num_ranks > 1 else ()


def _chunks(problem: Problem, policy: Policy) -> tuple[int, ...]:
    asked = problem.knobs.num_chunks
    if isinstance(problem.knobs.partition, tuple):
        if asked not in (None, len(problem.knobs.partition)):
            raise ValueError(
                f"partition lists {len(problem.knobs.partition)} chunks, but num_chunks is {asked}; make them agree"
            )
        asked = len(problem.knobs.partition)
    if asked is not None:
        return () if policy.on_chunks and asked != 1 else (asked,)
    if policy.on_chunks:
        return (1,)
    most = problem.length // problem.shortest_chunk
    return tuple(number for number in CHUNKS if number <= most) or (1,)


def partitions(problem: Problem, num_chunks: int) -> tuple[float | tuple[int, ...], ...]:
    """The partitions that the problem's knobs leave; of those with the same chunks the one nearest to even."""
    if problem.knobs.partition is not None:
        return (problem.knobs.partition,)
    if num_chunks == 1:
        return (1.0,)
    different: dict[tuple[Span, ...], float] = {}
    for number in PARTITIONS:
        different.setdefault(_spans(number, problem.length, num_chunks, problem.shape, problem.multiple), number)
    return tuple(different.values())


def _memory_knobs(problem: Problem, schedule: str) -> tuple[int | None, ...]:
    asked = problem.knobs.memory_knob
    if asked is None:
        return MEMORY_KNOBS[schedule]
    if asked < 1:
        raise ValueError(f"memory_knob must be at least 1, not {asked}")
    if POLICIES[schedule].memory_knob is not None:
        return (asked,)
    if problem.knobs.schedule is not None:
        raise ValueError(
            f"memory_knob={asked} has no effect on {schedule}, which takes all forwards first; leave it out"
        )
    return ()


@lru_cache(maxsize=64)
def parts(problem: Problem) -> PartCosts:
    """Seconds of the model's parts, by which layers are shared out: as measured, where there is a profile."""
    return part_seconds(problem.shape, problem.length, problem.training, problem.machine, problem.profile)


def _layers(problem: Problem, virtual_stages: int) -> tuple[int, ...]:
    asked = problem.knobs.layers
    if asked is None:
        return balanced_layers(problem.shape, problem.num_ranks, virtual_stages, parts=parts(problem))
    if sum(asked) != problem.shape.num_layers or len(asked) != problem.num_ranks * virtual_stages:
        raise ValueError(
            f"layers lists {len(asked)} stages with {sum(asked)} layers, but the model has {problem.shape.num_layers} "
            f"layers on {problem.num_ranks} ranks x {virtual_stages} virtual stages; make them agree"
        )
    return asked


def _contradiction(problem: Problem) -> str:
    knobs = problem.knobs
    given = ", ".join(f"{name}={value!r}" for name, value in vars(knobs).items() if value is not None)
    able = "; ".join(
        f"{name} takes {'num_chunks=1' if POLICIES[name].on_chunks else 'any num_chunks'} and "
        f"virtual_stages{' above 1' if POLICIES[name].interleaves else '=1'}"
        for name in MEMORY_KNOBS
        if knobs.schedule in (None, name)
    )
    return f"no schedule fits {given} with {problem.num_ranks} ranks; leave one of them out ({able})"
