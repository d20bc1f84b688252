"""Times and bytes of units against sums done by hand, and against each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.costs import ModelShape, flops_of_head, flops_of_layers
from lightning_seq1f1b.schedule.estimate import (
    MACHINES,
    Machine,
    Training,
    message_seconds,
    part_seconds,
    resident_bytes,
    transient_bytes,
    unit_sizes,
    unit_times,
)
from lightning_seq1f1b.schedule.profile import PASSES, Fit, Profile
from lightning_seq1f1b.schedule.spans import Span, spans
from lightning_seq1f1b.schedule.unit_times import UnitTimes

SHAPE = ModelShape(6, 64, 4, 2, 16, 256, True, 1000)
WINDOWED = replace(SHAPE, layers=tuple(replace(SHAPE.layer(0), window=(9, None)[index % 2]) for index in range(6)))
EXPERTS = ModelShape(6, 64, 4, 2, 16, 0, True, 1000, num_experts=8, experts_per_token=2, expert_size=100)
MACHINE = Machine(1e9, 5e8, 2e9, None, bandwidth=1e6, latency=0.25, launch=0.0)
TRAINING = Training(rows=3)
CHUNKS = spans([50, 30, 20])

splits = st.lists(st.integers(0, 5), min_size=0, max_size=4, unique=True).map(
    lambda cuts: tuple(stop - start for start, stop in pairwise(sorted({0, 6, *cuts})))
)
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=5)
shapes = st.sampled_from([SHAPE, WINDOWED, EXPERTS])
trainings = st.builds(
    Training,
    rows=st.integers(1, 3),
    activation_bytes=st.sampled_from([2, 4]),
    trainable_share=st.sampled_from([1.0, 0.01, 0.0]),
    recompute=st.booleans(),
)


def profile_of(shape: ModelShape) -> Profile:
    def fits(scale: float) -> dict[str, Fit]:
        return {name: Fit(scale * factor, 10 * scale * factor, 0.5 * factor) for factor, name in enumerate(PASSES, 1)}

    return Profile(shape, 2, "float32", "a device", fits(1.0), fits(3.0), fits(7.0))


def total(times: UnitTimes) -> float:
    return sum(time for table in (times.forward, times.input_grad, times.weight_grad) for row in table for time in row)


def test_a_stage_takes_its_flops_at_two_rates() -> None:
    times = unit_times(SHAPE, (2, 4), CHUNKS, TRAINING, MACHINE)
    flops, head = flops_of_layers(SHAPE, range(4), 50, 80), flops_of_head(SHAPE, 50, 80).linear
    assert times.forward[1][1] == pytest.approx(3 * ((flops.linear + head) / 1e9 + flops.attention / 5e8))
    assert times.input_grad[1][1] == pytest.approx(3 * ((flops.linear + 2 * head) / 1e9 + 2.5 * flops.attention / 5e8))
    assert times.weight_grad[1][1] == pytest.approx(3 * flops.linear / 1e9)  # the head's is not put off
    flops = flops_of_layers(SHAPE, range(2), 0, 50)
    assert times.forward[0][0] == pytest.approx(3 * (flops.linear / 1e9 + flops.attention / 5e8))
    assert times(Action.parse("1B0.2")) == times(Action.parse("1I0.2")) + times(Action.parse("1W2.2"))


@given(shapes, splits, lengths, trainings)
def test_work_is_the_same_however_it_is_split(
    shape: ModelShape, layers: tuple[int, ...], chunks: list[int], training: Training
) -> None:
    whole = unit_times(shape, (6,), spans([sum(chunks)]), training, MACHINE)
    assert total(unit_times(shape, layers, spans(chunks), training, MACHINE)) == pytest.approx(total(whole))


def test_work_of_training_is_that_of_the_flops() -> None:
    machine = replace(MACHINE, attention_flops=1e9)
    for shape in (SHAPE, WINDOWED, EXPERTS):
        flops = flops_of_layers(shape, range(6), 0, 100) + flops_of_head(shape, 0, 100)
        assert total(unit_times(shape, (3, 3), CHUNKS, TRAINING, machine)) == pytest.approx(3 * flops.training / 1e9)


def test_every_unit_pays_a_launch_for_every_layer_and_pass() -> None:
    slow = replace(MACHINE, launch=0.125)
    plain, launched = (unit_times(SHAPE, (2, 4), CHUNKS, TRAINING, machine) for machine in (MACHINE, slow))
    for stage, layers in enumerate((2, 4)):
        for chunk in range(3):
            forward, backward = (
                launched(Action.parse(f"{stage}{kind}0.{chunk}")) - plain(Action.parse(f"{stage}{kind}0.{chunk}"))
                for kind in "FB"
            )
            assert forward == pytest.approx(0.125 * layers)
            assert backward == pytest.approx(0.125 * layers)
            assert launched.weight_grad[stage][chunk] > plain.weight_grad[stage][chunk]


def test_recomputation_runs_the_layers_forward_again_and_not_the_head() -> None:
    once, twice = (
        unit_times(SHAPE, (2, 4), CHUNKS, replace(TRAINING, recompute=recompute), MACHINE)
        for recompute in (False, True)
    )
    assert (twice.forward, twice.weight_grad) == (once.forward, once.weight_grad)
    for chunk, span in enumerate(CHUNKS):
        flops = flops_of_layers(SHAPE, range(4), span.start, span.stop)
        again = 3 * (flops.linear / 1e9 + flops.attention / 5e8)
        assert twice.input_grad[1][chunk] - once.input_grad[1][chunk] == pytest.approx(again)


def test_frozen_weights_have_no_gradient() -> None:
    none = unit_times(EXPERTS, (3, 3), CHUNKS, replace(TRAINING, trainable_share=0.0), MACHINE)
    assert none.weight_grad == ((0.0,) * 3,) * 2
    flops = flops_of_layers(EXPERTS, range(3), 0, 50)
    assert none.input_grad[0][0] == pytest.approx(3 * (flops.linear / 1e9 + 2.5 * flops.attention / 5e8))


def test_the_loss_moves_bytes() -> None:
    """Of 1000 logits in bfloat16 a token: 6 bytes to float32, then 12 in the forward and 16 in the backward."""
    slow = replace(MACHINE, memory_bandwidth=1e6)
    plain, moving = (unit_times(SHAPE, (2, 4), CHUNKS, TRAINING, machine) for machine in (MACHINE, slow))
    assert moving.forward[0] == plain.forward[0]
    assert moving.forward[1][0] - plain.forward[1][0] == pytest.approx(3 * 50 * 1000 * (6 + 12) / 1e6)
    assert moving.input_grad[1][0] - plain.input_grad[1][0] == pytest.approx(3 * 50 * 1000 * (6 + 16) / 1e6)
    assert moving.weight_grad == plain.weight_grad


def test_a_profile_is_used_as_it_was_measured() -> None:
    times = unit_times(SHAPE, (2, 4), CHUNKS, Training(rows=2), MACHINE, profile_of(SHAPE))
    pairs, tokens = 30 * 80 - 30**2 / 2, 30
    for factor, table in enumerate((times.forward, times.input_grad, times.weight_grad), 1):
        layer, embedding, head = (factor * (scale * (pairs + 10 * tokens) + 0.5) for scale in (1, 3, 7))
        assert table[0][1] == pytest.approx(2 * layer + embedding)
        assert table[1][1] == pytest.approx(4 * layer + head)


def test_a_profile_of_other_rows_is_scaled_but_for_its_constant() -> None:
    two, six = (unit_times(SHAPE, (6,), CHUNKS, Training(rows=rows), MACHINE, profile_of(SHAPE)) for rows in (2, 6))
    constants = 6 * 0.5 + 0.5 + 0.5
    assert six.forward[0][0] - constants == pytest.approx(3 * (two.forward[0][0] - constants))


def test_a_profile_knows_windows_and_the_sizes_of_layers() -> None:
    wide = replace(SHAPE.layer(0), matrices=3 * SHAPE.layer(0).matrices)
    shape = replace(SHAPE, layers=(replace(SHAPE.layer(0), window=9), *(SHAPE.layer(0),) * 2, *(wide,) * 3))
    times = unit_times(shape, (1, 4, 1), spans([100]), Training(rows=2), MACHINE, profile_of(shape))
    # Mean width 2: layers of 0.5 and of 1.5 of it. Three embeddings and seven heads lie in the ends.
    full, window = 100 * 100 / 2, 9 * 9 / 2 + 91 * 9
    assert times.forward[0][0] == pytest.approx(window + 10 * 50 + 0.5 + 3 * (full + 1000) + 0.5)
    assert times.forward[1][0] == pytest.approx(4 * (full + 0.5) + 10 * (50 + 50 + 150 + 150))
    assert times.forward[2][0] == pytest.approx(full + 10 * 150 + 0.5 + 7 * (full + 1000) + 0.5)


@given(shapes, splits, st.booleans(), trainings)
def test_parts_add_up_to_units(shape: ModelShape, layers: tuple[int, ...], profiled: bool, training: Training) -> None:
    machine = replace(MACHINE, launch=1e-3, memory_bandwidth=1e8)
    profile = profile_of(shape) if profiled else None
    parts = part_seconds(shape, 100, training, machine, profile)
    whole = unit_times(shape, layers, spans([100]), training, machine, profile)
    assert sum(parts.layers) + parts.embedding + parts.head == pytest.approx(total(whole))


@given(shapes, splits, lengths, trainings)
def test_bytes_add_up_however_layers_are_split(
    shape: ModelShape, layers: tuple[int, ...], chunks: list[int], training: Training
) -> None:
    tokens = training.rows * sum(chunks)
    sizes = unit_sizes(shape, layers, spans(chunks), training)
    whole = unit_sizes(shape, (6,), spans([sum(chunks)]), training)
    assert sum(map(sum, sizes.keys_values)) == pytest.approx(whole.keys_values[0][0])
    assert sum(map(sum, sizes.deferred)) == pytest.approx(whole.deferred[0][0])
    # Every cut is sent by one stage and received by the next; in float32 a norm keeps what was received anyway.
    copies = 1 if training.activation_bytes == 4 and not training.recompute else 2
    copies = 1 if training.recompute else copies
    cuts = (len(layers) - 1) * copies * 64 * training.activation_bytes * tokens
    assert sum(map(sum, sizes.activations)) == pytest.approx(whole.activations[0][0] + cuts)


def test_activations_of_a_llama_are_those_that_its_code_keeps() -> None:
    """Of a token in bfloat16 4 h, queries and output, 4 f; in float32 inputs and factors of norms, and log-sum-exps.

    On top comes what was received and what is sent, or on the last stage a norm and the softmax of the logits. Here h
    is 64 and f 256; there are 4 heads of 16.
    """
    layer = 2 * (4 * 64 + 2 * 64 + 4 * 256) + 4 * (2 * 64 + 2 + 4)
    sizes = unit_sizes(SHAPE, (2, 3, 1), CHUNKS, TRAINING)
    assert sizes.activations[0][1] == 3 * 30 * (2 * layer + 2 * 64)
    assert sizes.activations[1][1] == 3 * 30 * (3 * layer + 4 * 64)
    assert sizes.activations[2][1] == 3 * 30 * (layer + 2 * 64 + 2 * 2 * 64 + 4 * 64 + 4 * 1000)
    wide = unit_sizes(SHAPE, (2, 3, 1), CHUNKS, replace(TRAINING, activation_bytes=4))
    assert wide.activations[1][1] == 3 * 30 * (3 * 4 * (6 * 64 + 4 * 256 + 2 * 64 + 2 + 4) + 4 * 64)


def test_what_waits_for_the_weight_gradient_are_inputs_and_output_gradients() -> None:
    read, given_ = 64 + 64 + 64 + 256, (64 + 2 * 32) + 64 + 2 * 256 + 64
    sizes = unit_sizes(SHAPE, (2, 4), CHUNKS, TRAINING)
    assert sizes.deferred[0][0] == 3 * 50 * 2 * 2 * (read + given_)
    assert sizes.deferred[1][0] == 3 * 50 * 2 * 4 * (read + given_)
    frozen = unit_sizes(SHAPE, (2, 4), CHUNKS, replace(TRAINING, trainable_share=0.0))
    assert frozen.deferred == ((0.0,) * 3,) * 2


def test_keys_and_values_are_of_the_whole_row_and_their_gradients_in_float32() -> None:
    sizes = unit_sizes(SHAPE, (2, 4), CHUNKS, TRAINING)
    assert sizes.keys_values[0] == (3 * 100 * 2 * 64 * 2, 0.0, 3 * 100 * 2 * 64 * 4)
    whole = unit_sizes(SHAPE, (2, 4), spans([100]), TRAINING)
    assert whole.keys_values[1] == (3 * 100 * 4 * 64 * (2 + 4),)


def test_recomputation_keeps_the_inputs_of_layers() -> None:
    sizes = unit_sizes(SHAPE, (2, 4), CHUNKS, replace(TRAINING, recompute=True))
    assert sizes.activations[0][0] == 3 * 50 * (2 * 2 * 64 + 2 * 64)
    again = transient_bytes(SHAPE, (2, 4), CHUNKS, (0, 1), replace(TRAINING, recompute=True))
    plain = transient_bytes(SHAPE, (2, 4), CHUNKS, (0, 1), TRAINING)
    layer = 2 * (4 * 64 + 2 * 64 + 4 * 256) + 4 * (2 * 64 + 2 + 4)
    assert again[0] - plain[0] == 3 * 50 * layer


def test_the_largest_of_a_ranks_actions_counts() -> None:
    layer = 3 * 50 * 2 * ((64 + 2 * 32) + 64 + 2 * 256 + 64 + 2 * 64)
    logits = 3 * 50 * 1000 * (2 + 4)
    assert transient_bytes(SHAPE, (2, 2, 1, 1), CHUNKS, (0, 1, 0, 1), TRAINING) == [layer, logits]
    assert transient_bytes(SHAPE, (3, 3), CHUNKS, (0, 0), TRAINING) == [logits]
    assert transient_bytes(replace(SHAPE, vocab_size=7), (3, 3), CHUNKS, (0, 1), TRAINING) == [layer, layer]


LARGE = replace(SHAPE, vocab_size=1_000_000)
KEPT = replace(TRAINING, logits_slice=None)
SLICED = replace(TRAINING, logits_slice=4e7)
"""Slices of ten million logits: three tokens of each of three rows."""


def test_logits_in_slices_are_work_of_the_backward() -> None:
    slow = replace(MACHINE, memory_bandwidth=1e6)
    kept, sliced = (unit_times(LARGE, (2, 4), CHUNKS, training, slow) for training in (KEPT, SLICED))
    plain = unit_times(replace(LARGE, vocab_size=0), (2, 4), CHUNKS, KEPT, slow)
    assert sliced.forward == plain.forward
    assert sliced.weight_grad == kept.weight_grad
    assert sliced.input_grad[0] == kept.input_grad[0]
    for chunk in range(3):
        both = Action.parse(f"1F0.{chunk}"), Action.parse(f"1B0.{chunk}")
        assert sum(map(sliced, both)) == pytest.approx(sum(map(kept, both)))


def test_a_profile_gives_the_heads_forward_to_the_backward_too() -> None:
    kept, sliced = (
        unit_times(LARGE, (2, 4), CHUNKS, replace(training, rows=2), MACHINE, profile_of(SHAPE))
        for training in (KEPT, SLICED)
    )
    pairs, tokens = 30 * 80 - 30**2 / 2, 30
    head = 7 * (pairs + 10 * tokens) + 0.5
    assert kept.forward[1][1] - sliced.forward[1][1] == pytest.approx(head)
    assert sliced.input_grad[1][1] - kept.input_grad[1][1] == pytest.approx(head)


def test_logits_in_slices_are_not_kept() -> None:
    kept, sliced, without = (
        unit_sizes(shape, (2, 4), CHUNKS, training)
        for shape, training in ((LARGE, KEPT), (LARGE, SLICED), (replace(LARGE, vocab_size=0), KEPT))
    )
    assert sliced == without
    assert kept.activations[1][1] - sliced.activations[1][1] == pytest.approx(3 * 30 * 4 * 1_000_000)
    # Few logits of a chunk are kept, in any case: here those of the second and third one.
    some = replace(SHAPE, vocab_size=90_000)
    mixed, all_kept = (unit_sizes(some, (2, 4), CHUNKS, training).activations[1] for training in (SLICED, KEPT))
    assert [one == other for one, other in zip(mixed, all_kept, strict=True)] == [False, True, True]


def test_a_slice_is_what_the_head_makes_and_frees() -> None:
    [_, last] = transient_bytes(LARGE, (2, 4), CHUNKS, (0, 1), SLICED)
    # Two bytes of logits, three times four of their softmax and its gradients, for 3 x 3 tokens.
    assert last == 3 * 3 * 1_000_000 * (2 + 3 * 4)
    [_, longer] = transient_bytes(LARGE, (2, 4), spans([5000, 30]), (0, 1), SLICED)
    assert longer == last
    [_, kept] = transient_bytes(LARGE, (2, 4), CHUNKS, (0, 1), KEPT)
    assert kept == 3 * 50 * 1_000_000 * (2 + 4)


def test_ranks_hold_their_layers_and_the_ends() -> None:
    training = Training(weight_bytes=2, gradient_bytes=4, optimizer_bytes=12, trainable_share=0.5)
    layer, table = SHAPE.layer(0).parameters, 64 * 1000
    first, last = resident_bytes(SHAPE, (1, 2, 1, 2), (0, 1, 0, 1), training)
    assert (first.weights, last.weights) == (2 * (2 * layer + table), 2 * (4 * layer + table))
    assert (last.gradients, last.optimizer) == (last.weights, 3 * last.weights)
    assert first.total == first.weights + first.gradients + first.optimizer
    tied = replace(SHAPE, tied_embeddings=True)
    assert resident_bytes(tied, (3, 3), (0, 1), training) == resident_bytes(SHAPE, (3, 3), (0, 1), training)
    assert resident_bytes(tied, (3, 3), (0, 0), training)[0].weights == 2 * (6 * layer + table)


def test_parameters_of_a_known_model() -> None:
    llama = ModelShape(32, 4096, 32, 8, 128, 14336, True, 128256)
    [whole] = resident_bytes(llama, (32,), (0,), Training(weight_bytes=1))
    assert whole.weights == 8_029_995_008  # 8,030,261,248 without its norms


def test_a_message_has_a_latency_and_a_size() -> None:
    assert message_seconds(SHAPE, Span(10, 60), TRAINING, MACHINE) == pytest.approx(0.25 + 3 * 50 * 64 * 2 / 1e6)


@pytest.mark.parametrize("layers", [(), (3, 2), (6, 0), (7, -1)])
def test_layers_that_are_not_the_models_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be positive and add up to 6"):
        unit_times(SHAPE, layers, CHUNKS, TRAINING, MACHINE)


def test_machines_reach_less_than_their_peak() -> None:
    for machine in MACHINES.values():
        assert machine.attention_flops <= machine.flops < machine.peak_flops
        assert machine.launch > 0
        assert machine.memory_bandwidth < float("inf")
