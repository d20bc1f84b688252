"""FLOPs against counts done one by one, and layer splits against all others."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.costs import ModelShape, attended_pairs, head_flops, layer_flops, layers_per_stage

LLAMA_8B = ModelShape(32, 4096, 32, 8, 128, 14336, True, 128256)
GPT2 = ModelShape(12, 768, 12, 12, 64, 3072, False, 50257)

shapes = st.builds(
    ModelShape,
    num_layers=st.integers(1, 9),
    hidden_size=st.sampled_from([64, 2048]),
    num_heads=st.just(8),
    num_kv_heads=st.sampled_from([1, 8]),
    head_dim=st.sampled_from([16, 128]),
    intermediate_size=st.sampled_from([128, 8192]),
    gated_mlp=st.booleans(),
    vocab_size=st.sampled_from([100, 50_000, 1_000_000]),
    sliding_window=st.sampled_from([None, 1, 100, 4096]),
)


@given(st.integers(0, 60), st.integers(0, 60), st.none() | st.integers(1, 80))
def test_pairs_are_those_that_a_mask_lets_through(start: int, length: int, window: int | None) -> None:
    stop = start + length
    seen = [[key <= query and (window is None or key > query - window) for key in range(stop)] for query in range(stop)]
    pairs = sum(map(sum, seen[start:stop]))
    # The closed form takes tokens as points on a line: it counts the pairs at both edges of the mask half.
    at_upper_edge = length
    at_lower_edge = 0 if window is None else sum(query >= window for query in range(start, stop))
    assert attended_pairs(start, stop, window) == pairs - at_upper_edge / 2 + at_lower_edge / 2


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_pairs_are_those_of_the_paper(prefix: int, length: int) -> None:
    stop = prefix + length
    assert attended_pairs(prefix, stop) == length * stop - length**2 / 2


@given(shapes, st.lists(st.integers(0, 3000), min_size=2, max_size=6, unique=True).map(sorted), st.booleans())
def test_flops_of_chunks_add_up(shape: ModelShape, bounds: list[int], training: bool) -> None:
    for flops in (layer_flops, head_flops):
        parts = [flops(shape, start, stop, training=training) for start, stop in pairwise(bounds)]
        assert sum(parts) == pytest.approx(flops(shape, bounds[0], bounds[-1], training=training), rel=1e-12)


def test_linear_flops_are_two_for_each_weight() -> None:
    """At the start of a row attention vanishes beside the matrices: 2 FLOPs for each of 218,103,808 weights."""
    assert layer_flops(LLAMA_8B, 0, 1, training=False) == pytest.approx(2 * 218_103_808, rel=1e-4)
    assert layer_flops(GPT2, 0, 1, training=False) == pytest.approx(2 * (4 * 768**2 + 2 * 768 * 3072), rel=1e-3)
    assert head_flops(GPT2, 10, 11, training=False) == 2 * 768 * 50257


def test_attention_flops_are_four_for_each_pair_and_channel() -> None:
    first, second = (layer_flops(LLAMA_8B, start, start + 1, training=False) for start in (1000, 1001))
    assert second - first == 4 * 32 * 128


def test_training_takes_the_linear_part_three_times_and_attention_three_and_a_half_times() -> None:
    linear_only = 2 * 218_103_808
    forward = layer_flops(LLAMA_8B, 0, 131072, training=False)
    attention = forward - 131072 * linear_only
    assert attention > forward / 2
    assert layer_flops(LLAMA_8B, 0, 131072) == 3 * 131072 * linear_only + 3.5 * attention
    assert head_flops(LLAMA_8B, 0, 7) == 3 * head_flops(LLAMA_8B, 0, 7, training=False)


@given(shapes, st.data())
def test_no_split_of_the_layers_is_faster(shape: ModelShape, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, shape.num_layers))
    length = data.draw(st.sampled_from([1, 128, 8192]))
    layer, head = layer_flops(shape, 0, length), head_flops(shape, 0, length)

    def slowest(split: tuple[int, ...]) -> float:
        return max(layers * layer + (stage == num_stages - 1) * head for stage, layers in enumerate(split))

    chosen = layers_per_stage(shape, num_stages, length)
    assert len(chosen) == num_stages
    assert sum(chosen) == shape.num_layers
    assert min(chosen) >= 1
    for cuts in combinations(range(1, shape.num_layers), num_stages - 1):
        other = tuple(stop - start for start, stop in pairwise((0, *cuts, shape.num_layers)))
        assert slowest(chosen) <= slowest(other)


def test_the_stage_with_the_head_gets_fewer_layers() -> None:
    assert layers_per_stage(LLAMA_8B, 4, 8192) == (8, 9, 9, 6)
    assert layers_per_stage(LLAMA_8B, 4, 32768) == (8, 8, 9, 7)
    assert layers_per_stage(ModelShape(30, 576, 9, 3, 64, 1536, True, 49152), 2, 2048) == (18, 12)


def test_equal_splits_keep_later_stages_fuller() -> None:
    """The earlier a stage, the more units it holds: with a head of no weight, 3 + 2 + 2 and 2 + 2 + 3 are as fast."""
    assert layers_per_stage(ModelShape(7, 768, 12, 12, 64, 3072, False, 1), 3, 1024) == (2, 3, 2)


@pytest.mark.parametrize("num_stages", [0, 33])
def test_stages_that_cannot_be_filled_are_refused(num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"32 layers cannot fill {num_stages} stages.*num_stages between 1 and 32"):
        layers_per_stage(LLAMA_8B, num_stages, 1024)
