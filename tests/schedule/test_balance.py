"""Splits of layers against all others, and the search over chunks and layers against trying everything."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.balance import balanced_layers, nearby_layers
from lightning_seq1f1b.schedule.costs import ModelShape, PartCosts, head_flops, layer_flops, part_flops
from lightning_seq1f1b.schedule.split_search import Balance

LLAMA_8B = ModelShape(32, 4096, 32, 8, 128, 14336, True, 128256)


def shape_of(num_layers: int) -> ModelShape:
    return ModelShape(num_layers, 64, 4, 4, 16, 256, True, 100)


def all_splits(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *cuts, num_layers)))


@st.composite
def problems(draw: st.DrawFn) -> tuple[PartCosts, int, int]:
    num_layers = draw(st.integers(1, 10))
    num_ranks = draw(st.integers(1, num_layers))
    virtual_stages = draw(st.integers(1, num_layers // num_ranks))
    kinds = draw(st.lists(st.sampled_from([0.1, 1.0, 1.7, 3.0]), min_size=1, max_size=3))
    layers = draw(st.lists(st.sampled_from(kinds), min_size=num_layers, max_size=num_layers))
    ends = st.sampled_from([0.0, 0.4, 2.5, 9.0])
    return PartCosts(tuple(layers), draw(ends), draw(ends)), num_ranks, virtual_stages


@given(problems())
def test_no_split_is_better(problem: tuple[PartCosts, int, int]) -> None:
    parts, num_ranks, virtual_stages = problem
    num_layers = len(parts.layers)
    chosen = balanced_layers(shape_of(num_layers), num_ranks, virtual_stages, parts=parts)
    assert len(chosen) == num_ranks * virtual_stages
    assert sum(chosen) == num_layers
    assert min(chosen) >= 1
    balance = Balance.of(parts, chosen, num_ranks)
    assert balance.heaviest_rank == pytest.approx(rank_and_stage(parts, chosen, num_ranks)[0])
    best = min(rank_and_stage(parts, split, num_ranks) for split in all_splits(num_layers, len(chosen)))
    assert rank_and_stage(parts, chosen, num_ranks) == pytest.approx(best)


def rank_and_stage(parts: PartCosts, layers: tuple[int, ...], num_ranks: int) -> tuple[float, float]:
    """Cost of the heaviest rank and of the heaviest stage, added up layer by layer and without rounding of sums."""
    ranks, stages, rest = [0.0] * num_ranks, [0.0] * len(layers), list(parts.layers)
    for stage, count in enumerate(layers):
        stages[stage] = sum(rest[:count])
        del rest[:count]
    stages[0] += parts.embedding
    stages[-1] += parts.head
    for stage, cost in enumerate(stages):
        ranks[stage % num_ranks] += cost
    return round(max(ranks), 9), round(max(stages), 9)


def test_the_rank_with_the_head_gets_fewer_layers() -> None:
    assert balanced_layers(LLAMA_8B, 4, length=8192) == (8, 9, 9, 6)
    assert balanced_layers(LLAMA_8B, 4, length=32768) == (8, 8, 9, 7)
    assert balanced_layers(ModelShape(30, 576, 9, 3, 64, 1536, True, 49152), 2, length=2048) == (18, 12)


def test_with_virtual_stages_the_rank_counts_and_not_the_stage() -> None:
    layers = balanced_layers(LLAMA_8B, 4, 2, length=8192)
    assert [layers[rank] + layers[rank + 4] for rank in range(4)] == [8, 9, 9, 6]
    assert layers == (4, 4, 4, 4, 4, 5, 5, 2)


def test_equal_splits_keep_later_stages_fuller() -> None:
    """The earlier a stage, the more units it holds: with a head of no weight, 3 + 2 + 2 and 2 + 2 + 3 are as fast."""
    parts = PartCosts((1.0,) * 7, 0.0, 0.0)
    assert balanced_layers(shape_of(7), 3, parts=parts) == (2, 2, 3)
    assert balanced_layers(shape_of(7), 3, 2, parts=parts) == (1, 1, 1, 1, 1, 2)


@pytest.mark.parametrize(("num_ranks", "virtual_stages"), [(8, 1), (8, 2), (6, 4), (4, 3)])
def test_alternating_windows_leave_no_rank_far_behind(num_ranks: int, virtual_stages: int) -> None:
    """48 layers of which every sixth attends to all tokens, as in Gemma 3: too many splits to look at all."""
    parts = PartCosts(tuple(4.0 if index % 6 == 5 else 1.0 for index in range(48)), 0.0, 3.0)
    layers = balanced_layers(shape_of(48), num_ranks, virtual_stages, parts=parts)
    bound = (sum(parts.layers) + parts.head) / num_ranks
    assert Balance.of(parts, layers, num_ranks).heaviest_rank <= bound + max(parts.layers) / 2


@pytest.mark.parametrize(
    ("num_ranks", "virtual_stages", "message"),
    [
        (0, 1, "num_stages between 1 and 32"),
        (33, 1, "num_stages between 1 and 32"),
        (8, 5, r"cannot fill 40 stages \(8 ranks x 5\).*virtual_stages between 1 and 4"),
        (4, 0, "virtual_stages between 1 and 8"),
    ],
)
def test_stages_that_cannot_be_filled_are_refused(num_ranks: int, virtual_stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balanced_layers(LLAMA_8B, num_ranks, virtual_stages)


def test_costs_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="costs of 3 layers were given for a model of 4"):
        balanced_layers(shape_of(4), 2, parts=PartCosts((1.0, 2.0, 1.0)))


@given(problems(), st.integers(0, 2), st.integers(0, 3))
def test_nearby_splits_are_splits(problem: tuple[PartCosts, int, int], first: int, last: int) -> None:
    parts, num_ranks, virtual_stages = problem
    layers = balanced_layers(shape_of(len(parts.layers)), num_ranks, virtual_stages, parts=parts)
    nearby = list(nearby_layers(layers, num_ranks, parts, (first, last)))
    assert nearby[0] == layers
    assert len(set(nearby)) == len(nearby)
    for split in nearby:
        assert sum(split) == len(parts.layers)
        assert len(split) == len(layers)
        assert min(split) >= 1
        assert abs(split[0] - layers[0]) <= first or len(layers) == 1
        assert abs(split[-1] - layers[-1]) <= last or len(layers) == 1


def test_nearby_splits_reach_every_number_of_layers_beside_the_head() -> None:
    parts = part_flops(LLAMA_8B, 8192)
    nearby = set(nearby_layers((8, 9, 9, 6), 4, parts, (1, 2)))
    assert {(split[0], split[-1]) for split in nearby} == {(a, b) for a in (7, 8, 9) for b in (4, 5, 6, 7, 8)}
    assert (8, 9, 8, 7) in nearby or (8, 8, 9, 7) in nearby


def test_costs_are_flops_unless_given() -> None:
    parts = part_flops(LLAMA_8B, 4096)
    assert parts == PartCosts((layer_flops(LLAMA_8B, 0, 4096),) * 32, 0.0, head_flops(LLAMA_8B, 0, 4096))
    assert balanced_layers(LLAMA_8B, 4) == balanced_layers(LLAMA_8B, 4, parts=parts)
