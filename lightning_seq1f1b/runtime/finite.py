"""Finds the action of a step that was the first to make something NaN or infinite.

A NaN spreads: to the later stages and chunks, back through all gradients, and with the next optimizer step over all
weights. What an action computes is therefore looked at where it is computed. The answers stay on the device, and are
read once, at the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_seq1f1b.runtime.position import in_words
from lightning_seq1f1b.runtime.topology import Topology
from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.dependencies import dependencies
from lightning_seq1f1b.schedule.plan import Plan

_NAMED = 3
"""So many parameters are named in a message."""


@dataclass(frozen=True)
class Finding:
    """Something that is not finite.

    Attributes:
        action: what has computed it.
        what: "output", in words.
        place: the action's place in its rank's order.
    """

    action: Action
    what: str
    place: int


class FiniteCheck:
    """The look at one step of one rank.

    Args:
        module: holds the parameters of this rank.
        gradients: whether gradients are looked at too; with a loss scale they may overflow, and the step is skipped.
    """

    def __init__(self, module: nn.Module, *, gradients: bool) -> None:
        self._parameters = list(module.named_parameters())
        self._gradients = gradients
        self._seen: list[tuple[Action, str]] = []
        self._flags: list[Tensor] = []

    def forward(self, action: Action, output: Tensor) -> None:
        """Look at what a forward gives."""
        self._look(action, "output", [output])

    def result(self, action: Action, values: Mapping[str, Tensor]) -> None:
        """Look at what a microbatch gives: its loss, and whatever else is asked."""
        for name, value in values.items():
            self._look(action, name, [value])

    def backward(self, action: Action, sent: Tensor | None) -> None:
        """Look at the gradient for the stage before, None on the first, and at those of the parameters so far."""
        if not self._gradients:
            return
        if sent is not None:
            self._look(action, "input gradient", [sent])
        self.weight(action)

    def weight(self, action: Action) -> None:
        """Look at the gradients of the parameters after one of them has got its share."""
        gradients = [parameter.grad for _, parameter in self._parameters if parameter.grad is not None]
        if self._gradients and gradients:
            self._look(action, "gradient", gradients)

    def raise_first(self, plan: Plan, topology: Topology, group: dist.ProcessGroup) -> None:
        """End the step on all ranks of a pipeline where there is a finding on any.

        Args:
            plan: what has been executed.
            topology: where this process stands.
            group: the pipeline's control group.

        Raises:
            FloatingPointError: on all of them, naming the first finding.
        """
        findings: list[list[Finding]] = [[] for _ in topology.pipeline_ranks]
        dist.all_gather_object(findings, self.findings(), group=group)
        first = first_of(findings, plan)
        if first is None:
            return
        index, finding = first
        raise FloatingPointError(
            f"the {finding.what} of rank {topology.pipeline_ranks[index]} (stage {finding.action.stage} of replica "
            f"{topology.replica}, {in_words(finding.action)}) is NaN or infinite, and was the first to be: what it was "
            "computed from was finite. No weight has been changed by this step"
        )

    def _look(self, action: Action, what: str, tensors: Sequence[Tensor]) -> None:
        floating = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
        if floating:
            # The largest magnitude, unlike a sum, cannot overflow, and a NaN is larger than all.
            self._flags.append(nn.utils.get_total_norm(floating, float("inf")).isfinite())
            self._seen.append((action, what))

    def findings(self) -> list[Finding]:
        """What is not finite, in the order of looking; waits for the device, once."""
        if not self._flags:
            return []
        finite = torch.stack(self._flags).tolist()
        return [
            Finding(action, self._named() if what == "gradient" else what, place)
            for place, ((action, what), fine) in enumerate(zip(self._seen, finite, strict=True))
            if not fine
        ]

    def _named(self) -> str:
        names = [
            name
            for name, parameter in self._parameters
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
        ]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return f"gradient of {', '.join(names[:_NAMED])}{more}"


def first_of(findings: Sequence[Sequence[Finding]], plan: Plan) -> tuple[int, Finding] | None:
    """The rank and finding that none of the others can have led to.

    Args:
        findings: of every rank.
        plan: what they have executed.
    """
    found = {finding.action for each in findings for finding in each}
    first = [
        (finding.place, rank, finding)
        for rank, each in enumerate(findings)
        for finding in each
        if not found.intersection(dependencies(finding.action, plan.codes))
    ]
    if not first:
        return None
    _, rank, finding = min(first, key=lambda each: each[:2])
    return rank, finding
