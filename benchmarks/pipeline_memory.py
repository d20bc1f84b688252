"""The most memory that a step takes: as torch's CPU allocator sees it, and in relation to the formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.profiler import ProfilerActivity, profile

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.memory_curve import UnitSizes, peaks
from lightning_seq1f1b.schedule.plan import Plan
from lightning_seq1f1b.schedule.spans import Span


def peak_allocated(run: Callable[[], object]) -> int:
    """The most bytes of tensors that were made during `run` and alive at once.

    Counts every allocation, whoever asked for it: results of operations, what autograd saves, received tensors,
    gradients, and temporaries inside kernels. What was there before does not count.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def activation_growth(held: Sequence[tuple[Action, int]], units: int) -> float:
    """The most that a rank held, in relation to what it held once its first microbatch was forwarded.

    Args:
        held: bytes after each action.
        units: of one microbatch on this rank.
    """
    _, whole = held[units - 1]
    return max(after for _, after in held) / whole


def tokens_in_flight(plan: Plan, spans: Sequence[Span]) -> float:
    """The most tokens whose activations a rank holds by the plan's order, over those of one microbatch on it."""
    tokens = (tuple(float(span.length) for span in spans),) * plan.num_stages
    nothing = ((0.0,) * len(spans),) * plan.num_stages
    most = max(peaks(plan, UnitSizes(activations=tokens, deferred=tokens, keys_values=nothing)))
    return most / (plan.virtual_stages * spans[-1].stop)
