"""Tells, before the first batch of a training runs, how it is cut and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_seq1f1b.models import attention
from lightning_seq1f1b.schedule.estimate import MACHINES, Machine
from lightning_seq1f1b.schedule.plan import Plan
from lightning_seq1f1b.schedule.spans import Span
from lightning_seq1f1b.strategy.automatic import AUTO, training_of
from lightning_seq1f1b.strategy.cut_module import CutModule
from lightning_seq1f1b.strategy.forecast import Batch, Forecast, forecast

if TYPE_CHECKING:
    from lightning_seq1f1b.strategy.steps import PipelineSteps

MOST_ACTIONS = 10_000
"""Compute actions up to which a step is simulated before it runs: about a tenth of a second."""

TOLERANCE = 0.2
"""How far a prediction of memory may be off; the tests hold it to that. What they do not try is not predicted."""

_PREDICTABLE = "32-true"
_STATES: dict[type[Optimizer], int] = {torch.optim.Adam: 2, torch.optim.AdamW: 2}
"""Values of state for each weight."""

_GIB = 2.0**30

Announce = Callable[[Plan, tuple[tuple[Span, ...], ...], tuple[int, ...]], None]
"""Called with the plan, the chunks of every microbatch, and its rows."""


def announcer(strategy: PipelineSteps, cut: CutModule, schedule: str) -> Announce | None:
    """What to call with the first batch; None on all ranks but the first. Called on all of them."""
    weights = strategy.gather_over_stages(_trained_bytes(cut))
    if strategy.global_rank > 0:
        return None

    def announce(plan: Plan, spans: tuple[tuple[Span, ...], ...], rows: tuple[int, ...]) -> None:
        batch = Batch(plan, spans, rows)
        said = f"Seq1F1B: the first batch runs as {_cut_in_words(batch)}"
        if batch.actions <= MOST_ACTIONS:
            training = training_of(cut.model, str(strategy.precision_plugin.precision), strategy.root_device)
            machine = _known_machine(strategy.root_device)
            expected = forecast(batch, cut.shape, cut.layers, training, machine)
            # With the planner, its own words about this batch have just been said.
            said += "" if schedule == AUTO else _expected_in_words(expected)
            held = _memory(strategy, cut, weights, expected)
            said += (
                ""
                if held is None
                else f"; memory of the ranks, about: {', '.join(f'{n / _GIB:.3g}' for n in held)} GiB"
            )
        rank_zero_info(said)

    return announce


def _memory(
    strategy: PipelineSteps, cut: CutModule, weights: Sequence[float | None], expected: Forecast
) -> list[float] | None:
    """Bytes of every rank, of tensors; None where nobody has compared the prediction with what is."""
    states = {_STATES.get(type(optimizer)) for optimizer in strategy.optimizers}
    layers = map(cut.shape.layer, range(cut.shape.num_layers))
    known = (
        strategy.precision_plugin.precision == _PREDICTABLE
        and None not in states
        and cut.split.probe.attention == attention.NAME
        and not cut.shape.num_experts
        and all(layer.kv_width for layer in layers)
        and None not in weights
        and not any(getattr(module, "gradient_checkpointing", False) for module in cut.module.modules())
    )
    if not known:
        return None
    state = max((count or 0 for count in states), default=0) / _owners(strategy)
    each = 1 + strategy.gradient_sets + state
    return [each * (weight or 0.0) + held for weight, held in zip(weights, expected.activations, strict=True)]


def _owners(strategy: PipelineSteps) -> int:
    return strategy.topology.num_replicas if getattr(strategy, "shard_optimizer", False) else 1


def _trained_bytes(cut: CutModule) -> float | None:
    """Bytes of the weights on this rank; None where some of them are not trained, or not float32."""
    parameters = list(cut.module.parameters())
    if not all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in parameters):
        return None
    return float(sum(parameter.numel() * parameter.element_size() for parameter in parameters))


def _known_machine(device: torch.device) -> Machine | None:
    """The preset whose name is part of the device's; nothing is known of the speed of a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower()
    return next((machine for preset, machine in MACHINES.items() if preset in name), None)


def _cut_in_words(batch: Batch) -> str:
    lengths = [[span.length for span in spans] for spans in batch.spans]
    alike = all(row == lengths[0] for row in lengths)
    if alike and len(lengths[0]) <= 16:
        tokens = ", ".join(map(str, lengths[0]))
        chunks = f"{len(lengths[0])} chunk(s) each, of {tokens} tokens"
    else:
        fewest, most = min(map(len, lengths)), max(map(len, lengths))
        chunks = f"{fewest if fewest == most else f'{fewest} to {most}'} chunk(s) each"
    return f"{len(lengths)} microbatch(es) of {max(batch.rows)} row(s) in {chunks}"


def _expected_in_words(expected: Forecast) -> str:
    idle = f"; by its FLOPs the ranks wait for {expected.idle:.1%} of the step"
    return idle if expected.seconds is None else f"{idle}, which takes about {expected.seconds:.3g} s"
