"""Why a setting won, in sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_seq1f1b.schedule.planner.problem import Problem
from lightning_seq1f1b.schedule.planner.search import EQUAL, DoesNotFitError, Ranking
from lightning_seq1f1b.schedule.planner.settings import Setting

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def size(number: float) -> str:
    """Bytes in words, such as "79.2 GiB"."""
    place = 0
    while abs(number) >= 1000 and place < len(_UNITS) - 1:
        number /= 1024
        place += 1
    return f"{number:.3g} {_UNITS[place]}"


def words(setting: Setting) -> str:
    """A setting in words."""
    said = [setting.schedule]
    if setting.virtual_stages > 1:
        said.append(f"{setting.virtual_stages} virtual stages")
    if setting.num_chunks > 1:
        said.append(f"{setting.num_chunks} chunks ({boundaries(setting)})")
    if setting.memory_knob is not None:
        said.append(f"memory knob {setting.memory_knob}")
    return ", ".join(said)


def boundaries(setting: Setting) -> str:
    """How a setting cuts rows: "even", "balanced", how far between the two, or that it is a list."""
    if isinstance(setting.partition, tuple):
        return "listed"
    return {0.0: "even", 1.0: "balanced"}.get(setting.partition, f"{setting.partition:.0%} balanced")


def explain(ranking: Ranking) -> list[str]:
    """Sentences that say why the recommended setting is recommended."""
    best, problem = ranking.best, ranking.problem
    sentences = [
        f"{words(best.setting)}: {best.seconds:.4g} s a step with "
        f"{problem.num_microbatches} microbatch{'' if problem.num_microbatches == 1 else 'es'} on {problem.num_ranks} "
        f"rank{'' if problem.num_ranks == 1 else 's'}. Ranks idle {best.idle:.1%} of the step on average: "
        f"{100 * best.waiting:.1f} points for the schedule, {100 * (best.idle - best.waiting):.1f} points for layers "
        "that cannot be shared out evenly."
    ]
    if best.setting.schedule == "interleaved_1f1b":
        sentences.append(
            f"Plain interleaving wins: with {problem.num_microbatches} microbatches there is little idle time left "
            "that chunks along the sequence could remove."
        )
    sentences += [sentence for feature in FEATURES if (sentence := feature.compare(ranking)) is not None]
    if problem.memory is not None and ranking.too_large:
        sentences.append(
            f"Memory: {ranking.too_large} of {ranking.considered} settings do not fit into {size(problem.memory)}; "
            f"this one holds {size(best.peak)} on the fullest rank."
        )
    return sentences


@dataclass(frozen=True)
class Feature:
    """Something that a setting has or has not.

    Attributes:
        has: whether a setting has it.
        named: its name, to begin a sentence.
        without: what settings without it do, in the plural.
        because: why it can lose.
    """

    has: Callable[[Setting], bool]
    named: str
    without: str
    because: str

    def compare(self, ranking: Ranking) -> str | None:
        """The best setting against the best of the other kind; None when none of those was played and fits."""
        best = ranking.best
        chosen = self.has(best.setting)
        others = [found for found in ranking.predictions if self.has(found.setting) != chosen]
        if not others:
            return None
        other = min(others, key=lambda found: found.seconds)
        more = other.seconds / best.seconds - 1
        rival = f"{words(other.setting)}, which idles {other.idle:.1%}"
        near = "takes as long" if abs(more) < 5e-4 else f"takes {abs(more):.1%} {'less' if more < 0 else 'longer'}"
        if chosen and more <= EQUAL:
            return f"{self.named}: {self.without} are as fast, within {EQUAL:.1%} ({rival}, {near})."
        if chosen:
            return f"{self.named}: {self.without} take {more:.1%} longer at best ({rival})."
        if more <= EQUAL:
            return f"{self.named}: no gain to speak of ({rival}, {near}), so the simpler setting wins."
        return f"{self.named}: would take {more:.1%} longer ({rival}); {self.because}."


FEATURES = (
    Feature(
        lambda setting: setting.num_chunks > 1,
        "Chunks",
        "whole rows",
        "with this many microbatches whole rows idle little, and smaller kernels are less efficient",
    ),
    Feature(
        lambda setting: setting.virtual_stages > 1,
        "Interleaving",
        "settings with one stage on each rank",
        "it sends more messages, holds more, or spreads the layers less evenly",
    ),
    Feature(
        lambda setting: setting.splits,
        "Split backward",
        "backwards in one piece",
        "it only moves weight gradients into idle time, of which there is little here",
    ),
    Feature(
        lambda setting: setting.num_chunks > 1 and setting.partition != 0.0,
        "Chunk boundaries",
        "chunks of equal length, or none,",
        "chunks of equal work start with a long one, which holds more and fills the pipeline later",
    ),
)


def does_not_fit(error: DoesNotFitError, problem: Problem) -> str:
    """What to say when no setting fits: the smallest there is, and what else helps."""
    smallest = error.smallest
    fullest = max(range(len(smallest.peaks)), key=smallest.peaks.__getitem__)
    helps = ["more ranks", "shorter rows"]
    helps += [] if problem.training.recompute else ["activations that are computed again (gradient checkpointing)"]
    helps += ["adapters or an optimizer with a smaller state"] if problem.training.trainable_share == 1 else []
    return (
        f"no setting fits into {size(problem.memory or 0)} a rank: the smallest needs {size(smallest.peak)} (on rank "
        f"{fullest}), with {words(smallest.setting)}; use {', '.join(helps[:-1])}, or {helps[-1]}"
    )
