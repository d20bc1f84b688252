"""What a step with one setting takes: seconds, idle time, and the memory of every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_seq1f1b.schedule.costs import flops_of_head, flops_of_layers
from lightning_seq1f1b.schedule.planner.problem import Problem
from lightning_seq1f1b.schedule.planner.settings import Setting


class Memory(NamedTuple):
    """Bytes of one rank at the moment when it holds most.

    Attributes:
        weights: parameters.
        gradients: of the parameters.
        optimizer: its state.
        activations: kept for backwards.
        keys_values: keys, values and their gradients.
        logits: of the chunks that wait for the LM head's backward.
        working: what the largest single action makes and frees again.
        buffers: messages that are being sent and received.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    keys_values: float
    logits: float
    working: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


@dataclass(frozen=True)
class Prediction:
    """How a step would go with a setting.

    Attributes:
        setting: what was predicted.
        seconds: length of the step, without the optimizer's update.
        work: seconds that every rank computes.
        peaks: bytes that every rank holds at most.
        exact: whether the whole step was played, and not continued from its first microbatches.
        memory: of every rank, part by part, where weight gradients were followed as they run; else None, and `peaks`
            are of the plan's order.
    """

    setting: Setting
    seconds: float
    work: tuple[float, ...]
    peaks: tuple[float, ...]
    exact: bool
    memory: tuple[Memory, ...] | None = None

    @property
    def idle(self) -> float:
        """Idle share of the step, the mean over ranks."""
        return 1 - sum(self.work) / (len(self.work) * self.seconds)

    @property
    def waiting(self) -> float:
        """Idle share of the step on the busiest rank: what a better schedule could win, with the same layers."""
        return 1 - max(self.work) / self.seconds

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(self.peaks)

    def tokens_per_second(self, problem: Problem) -> float:
        """Tokens of the step over its length."""
        return problem.tokens / self.seconds

    def utilisation(self, problem: Problem) -> float:
        """Model FLOPs utilisation: FLOPs of forward and backward, over what all ranks could reach in that time.

        What is computed again in the backward does not count, nor do the gradients of weights that are not trained.
        """
        shape, share = problem.shape, problem.training.trainable_share
        parts = (
            flops_of_layers(shape, range(shape.num_layers), 0, problem.length),
            flops_of_head(shape, 0, problem.length),
        )
        row = sum(flops.forward + flops.input_grad + share * flops.weight_grad for flops in parts)
        rows = problem.num_microbatches * problem.training.rows
        return row * rows / (self.seconds * problem.num_ranks * problem.machine.peak_flops)
