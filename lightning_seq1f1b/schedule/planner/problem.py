"""What the planner is asked: a model, its rows, the ranks and their memory, and which knobs are not free."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.estimate import Machine, Training
from lightning_seq1f1b.schedule.profile import Profile


@dataclass(frozen=True)
class Knobs:
    """What the user has decided; None leaves the choice to the planner.

    Attributes:
        schedule: name of the schedule.
        virtual_stages: stages on each rank.
        num_chunks: chunks of every row.
        memory_knob: extra warm-up forwards for each rank behind; the plan's own default when no choice makes sense.
        partition: where rows are cut: 0 for equal tokens, 1 for equal work, or the chunks' lengths.
        layers: layers of every stage; its length is ranks x virtual stages.
    """

    schedule: str | None = None
    virtual_stages: int | None = None
    num_chunks: int | None = None
    memory_knob: int | None = None
    partition: float | tuple[int, ...] | None = None
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Problem:
    """One step to plan.

    Attributes:
        shape: the model.
        num_ranks: pipeline ranks.
        length: tokens of a row.
        num_microbatches: microbatches of the step, each of `training.rows` rows.
        training: rows of a microbatch and bytes of what training holds.
        machine: how fast one rank and its links are.
        profile: measured times of the model's layers, which then replace the machine's speeds.
        memory: bytes that a rank may use; None for no limit.
        multiple: tokens that chunk lengths are rounded to.
        shortest_chunk: tokens of the shortest chunk that is considered, when `num_chunks` is free.
        knobs: what is not free.
    """

    shape: ModelShape
    num_ranks: int
    length: int
    num_microbatches: int
    training: Training
    machine: Machine
    profile: Profile | None = field(default=None, hash=False)
    memory: float | None = None
    multiple: int = 1
    shortest_chunk: int = 1
    knobs: Knobs = field(default_factory=Knobs)

    def __post_init__(self) -> None:
        """Refuse numbers that no setting fits.

        Raises:
            ValueError: for a number below 1, or more ranks than layers.
        """
        for knob in ("num_ranks", "length", "num_microbatches", "multiple", "shortest_chunk"):
            if getattr(self, knob) < 1:
                raise ValueError(f"{knob} must be at least 1, not {getattr(self, knob)}")
        if self.num_ranks > self.shape.num_layers:
            raise ValueError(
                f"{self.shape.num_layers} layers cannot fill {self.num_ranks} ranks with at least one layer each; "
                f"use at most {self.shape.num_layers} ranks"
            )

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.length * self.num_microbatches * self.training.rows
