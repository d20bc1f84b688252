"""FLOPs against counts done one by one."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.costs import (
    Flops,
    ModelShape,
    attended_pairs,
    flops_of_layers,
    head_flops,
    layer_flops,
    part_flops,
)

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


def test_backward_is_split_into_what_can_wait_and_what_cannot() -> None:
    flops = Flops(linear=10.0, attention=4.0, joint=3.0)
    assert flops.forward == 14.0
    assert flops.input_grad == 10.0 + 3.0 + 2.5 * 4.0
    assert flops.weight_grad == 7.0
    assert flops.training == 14.0 + 20.0 + 10.0
    assert flops + flops == flops.times(2) == Flops(20.0, 8.0, 6.0)


def test_experts_cost_as_often_as_a_token_is_sent_to_them() -> None:
    """Of 8 experts of width 100 a token sees 2, beside a shared one of 50; all 8 have to be held."""
    shape = ModelShape(2, 64, 4, 4, 16, 50, True, 100, num_experts=8, experts_per_token=2, expert_size=100)
    layer, attention, router = shape.layer(0), 4 * 64 * 64, 64 * 8
    assert layer.matrices == attention + 3 * 64 * (50 + 2 * 100) + router
    assert layer.parameters == attention + 3 * 64 * (50 + 8 * 100) + router
    assert layer.joint_matrices == 3 * 64 * 2 * 100 + router


def test_values_may_be_of_another_size_than_keys() -> None:
    shape = ModelShape(2, 64, 4, 2, 24, 50, True, 100, value_head_dim=16)
    layer = shape.layer(0)
    assert layer.pair_width == 4 * (24 + 16)
    assert layer.kv_width == 2 * (24 + 16)
    assert layer.matrices == 64 * (4 * 24 + 2 * (24 + 16) + 4 * 16) + 3 * 64 * 50


@given(st.lists(st.sampled_from([None, 0, 7, 100]), min_size=1, max_size=5), st.integers(0, 200), st.integers(0, 200))
def test_every_layer_has_its_own_window(windows: list[int | None], start: int, length: int) -> None:
    one = ModelShape(len(windows), 64, 4, 4, 16, 256, True, 100)
    layers = tuple(replace(one.layer(0), window=window) for window in windows)
    shape, stop = replace(one, layers=layers), start + length
    flops = flops_of_layers(shape, range(len(windows)), start, stop)
    pairs = sum(attended_pairs(start, stop, window) for window in windows)
    assert flops.attention == pytest.approx(4 * 64 * pairs)
    assert flops.linear == pytest.approx(len(windows) * flops_of_layers(one, [0], start, stop).linear)
    assert layer_flops(shape, start, stop) == pytest.approx(flops.training / len(windows))
    parts = part_flops(shape, stop)
    assert parts.layers == tuple(flops_of_layers(shape, [index], 0, stop).training for index in range(len(windows)))
    assert parts.head == head_flops(shape, 0, stop)


def test_layers_that_are_not_as_many_are_refused() -> None:
    with pytest.raises(ValueError, match="a shape of 32 layers describes 2 of them"):
        replace(LLAMA_8B, layers=(LLAMA_8B.layer(0),) * 2)
