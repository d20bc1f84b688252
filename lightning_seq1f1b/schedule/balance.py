"""How many layers every stage gets: by cost, and what else is worth trying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

from lightning_seq1f1b.schedule.costs import ModelShape, PartCosts, part_flops
from lightning_seq1f1b.schedule.split_search import split_different, split_in_order, split_uniform


def balanced_layers(
    shape: ModelShape, num_ranks: int, virtual_stages: int = 1, *, length: int = 4096, parts: PartCosts | None = None
) -> tuple[int, ...]:
    """How many layers each stage gets, so that the busiest rank, and then the heaviest stage, do as little as possible.

    Stage s lives on rank s % num_ranks. The last stage also runs the LM head, so its rank gets fewer layers where the
    vocabulary is large. What does not divide goes to later stages, because the earlier a stage, the more units it holds
    in memory.

    Exact for one stage on a rank, and for any number when all layers cost the same. Otherwise exact as long as a
    branch-and-bound search ends within its budget, which it does for few layers, else the best split it has found.

    Args:
        shape: the architecture.
        num_ranks: ranks of the pipeline.
        virtual_stages: stages on each rank.
        length: tokens of a row, which weigh attention and head against the rest.
        parts: cost of every layer and of what runs before and after them; None for the FLOPs of forward and backward.

    Returns:
        The number of layers of every stage, all at least 1.

    Raises:
        ValueError: if there are more stages than layers, or `parts` is of another number of layers.
    """
    stages = num_ranks * virtual_stages
    if num_ranks < 1 or virtual_stages < 1 or stages > shape.num_layers:
        knob = (
            f"virtual_stages between 1 and {shape.num_layers // num_ranks}"
            if 1 <= num_ranks <= shape.num_layers
            else (f"num_stages between 1 and {shape.num_layers}")
        )
        raise ValueError(
            f"{shape.num_layers} layers cannot fill {stages} stages ({num_ranks} ranks x {virtual_stages}) with at "
            f"least one layer each; set {knob}"
        )
    return _balanced(parts or part_flops(shape, length), shape.num_layers, num_ranks, virtual_stages)


@lru_cache(maxsize=256)
def _balanced(parts: PartCosts, num_layers: int, num_ranks: int, virtual_stages: int) -> tuple[int, ...]:
    if len(parts.layers) != num_layers:
        raise ValueError(f"costs of {len(parts.layers)} layers were given for a model of {num_layers}")
    if len(set(parts.layers)) == 1:
        return split_uniform(parts, num_ranks, virtual_stages)
    if virtual_stages == 1:
        return split_in_order(parts, num_ranks)
    return split_different(parts, num_ranks, virtual_stages)


def nearby_layers(
    layers: Sequence[int], num_ranks: int, parts: PartCosts, reach: tuple[int, int]
) -> Iterator[tuple[int, ...]]:
    """Splits whose first and last stage have a few layers more or fewer; the stages between them share the difference.

    Args:
        layers: the split to start from, which comes first; those that differ least from it follow.
        num_ranks: ranks of the pipeline.
        parts: the costs that say which rank is lightest, and gets a layer, or heaviest, and gives one.
        reach: how many layers more or fewer the first, and the last stage, may have.
    """
    steps = product(*(range(-most, most + 1) for most in reach))
    for first, last in sorted(steps, key=lambda pair: (abs(pair[0]) + abs(pair[1]), pair)):
        moved = list(layers)
        moved[0] += first
        if len(layers) > 1:
            moved[-1] += last
        elif last != 0:
            continue
        if moved[0] >= 1 and moved[-1] >= 1 and _shared(moved, first + last, num_ranks, parts):
            yield tuple(moved)


def _shared(layers: list[int], surplus: int, num_ranks: int, parts: PartCosts) -> bool:
    """Take `surplus` layers from the stages between the first and the last; False when they have too few."""
    between = range(1, len(layers) - 1)
    mean = sum(parts.layers) / len(parts.layers)

    def load(stage: int) -> tuple[float, int, int]:
        rank = stage % num_ranks
        extra = (parts.embedding if rank == 0 else 0.0) + (parts.head if rank == num_ranks - 1 else 0.0)
        return mean * sum(layers[rank::num_ranks]) + extra, layers[stage], -stage

    for _ in range(abs(surplus)):
        changed = between if surplus < 0 else [stage for stage in between if layers[stage] > 1]
        if not changed:
            return False
        if surplus < 0:
            layers[min(changed, key=load)] += 1
        else:
            layers[max(changed, key=load)] -= 1
    return True
