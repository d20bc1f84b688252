"""The cache that a model sees while it runs one chunk."""

from __future__ import annotations

import weakref

import pytest
import torch
from support.tiny_models import tiny_config
from torch import Tensor

from lightning_seq1f1b.models.chunk_cache import ChunkedState, layer_kinds
from lightning_seq1f1b.schedule.spans import Span, spans

SPANS = spans([5, 9, 6])


def state(family: str) -> ChunkedState:
    return ChunkedState(layer_kinds(tiny_config(family)), SPANS[-1].stop)


def keys_and_values(span: Span) -> tuple[Tensor, Tensor]:
    """Recognisable by their position: entry t of a row is t, of values -t."""
    position = torch.arange(span.start, span.stop, dtype=torch.float64)[:, None]
    return position.expand(2, 2, -1, 4).contiguous(), -position.expand(2, 2, -1, 6).contiguous()


@pytest.mark.parametrize("window", [None, 11, 3])
def test_update_returns_the_prefix_or_what_a_window_reaches(window: int | None) -> None:
    config = tiny_config("mistral", sliding_window=window)
    microbatch = ChunkedState(layer_kinds(config), SPANS[-1].stop)
    for index, span in enumerate(SPANS):
        cache = microbatch.chunk(index, span)
        keys, values = cache.update(*keys_and_values(span), layer_idx=2)
        lowest = 0 if window is None else max(0, span.start - window + 1)
        assert keys[0, 0, :, 0].tolist() == list(range(lowest, span.stop))
        assert values[1, 1, :, 5].tolist() == [-position for position in range(lowest, span.stop)]
        assert cache.get_mask_sizes(span.length, 2) == (keys.shape[2], lowest)
        assert cache.get_seq_length() == cache.get_query_offset() == span.start


def test_without_gradients_only_layers_with_a_window_drop_what_is_behind_it() -> None:
    microbatch = state("gemma3_text")
    windows = [microbatch.window(layer) for layer in range(4)]
    assert set(windows) == {None, 11}
    with torch.no_grad():
        for index, span in enumerate(SPANS):
            for layer in range(4):
                microbatch.chunk(index, span).update(*keys_and_values(span), layer)
    token = sum(states[:, :, :1].nbytes for states in keys_and_values(SPANS[0]))
    for layer, window in enumerate(windows):
        held = SPANS[-1].stop if window is None else window - 1 + SPANS[-1].length
        assert microbatch.buffer("attention", layer).nbytes() == held * token


def test_a_chunk_that_is_run_twice_is_refused() -> None:
    microbatch = state("llama")
    for index, span in enumerate(SPANS[:2]):
        microbatch.chunk(index, span).update(*keys_and_values(span), layer_idx=0)
    with pytest.raises(ValueError, match="chunks are appended once and in order"):
        microbatch.chunk(1, SPANS[1]).update(*keys_and_values(SPANS[1]), layer_idx=0)


def test_layers_are_kept_apart() -> None:
    microbatch = state("llama")
    cache = microbatch.chunk(0, SPANS[0])
    ones, twos = torch.ones(1, 2, 5, 4), torch.full((1, 2, 5, 4), 2.0)
    assert cache.update(ones, ones, 0)[0].unique().tolist() == [1.0]
    assert cache.update(twos, twos, 1)[0].unique().tolist() == [2.0]


def test_under_autocast_the_buffers_have_its_dtype() -> None:
    cache = state("llama").chunk(0, SPANS[0])
    with torch.autocast("cpu", torch.bfloat16):
        keys, values = cache.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4).bfloat16(), 0)
        double, _ = cache.update(torch.ones(1, 2, 5, 4).double(), torch.ones(1, 2, 5, 4).double(), 1)
    assert keys.dtype == values.dtype == torch.bfloat16
    assert double.dtype == torch.float64


def test_an_indexer_has_keys_of_its_own() -> None:
    microbatch = state("llama")
    for index, span in enumerate(SPANS):
        cache = microbatch.chunk(index, span)
        cache.update(*keys_and_values(span), layer_idx=0)
        found = cache.update_indexer(torch.full((2, span.length, 3), float(index)), 0)
    assert found[0, :, 0].tolist() == [0.0] * 5 + [1.0] * 9 + [2.0] * 6


def test_recurrent_and_convolution_states_go_on_from_chunk_to_chunk() -> None:
    microbatch = state("qwen3_next")
    first, second = microbatch.chunk(0, SPANS[0]), microbatch.chunk(1, SPANS[1])
    assert first.get_recurrent_state(0) is None
    assert first.get_conv_state(0) is None
    assert not first.has_previous_state(0)
    first.update_recurrent_state(torch.tensor([3.0]), 0)
    inputs = torch.arange(5.0).view(1, 1, 5)
    assert first.update_conv_state(inputs, 0, conv_kernel_size=3).tolist() == inputs.tolist()
    assert second.has_previous_state(0)
    assert second.get_recurrent_state(0).tolist() == [3.0]
    assert second.get_conv_state(0).tolist() == [[[2.0, 3.0, 4.0]]]
    joined = second.update_conv_state(torch.tensor([[[5.0]]]), 0, conv_kernel_size=3)
    assert joined.tolist() == [[[2.0, 3.0, 4.0, 5.0]]]


def test_a_first_chunk_shorter_than_the_convolution_is_padded() -> None:
    microbatch = state("qwen3_next")
    first = microbatch.chunk(0, SPANS[0]).update_conv_state(torch.ones(1, 1, 2), 0, conv_kernel_size=4)
    assert first.tolist() == [[[0.0, 0.0, 1.0, 1.0]]]


def test_gradients_of_a_recurrence_come_back_through_carried() -> None:
    """Three chunks of s_j = a s_(j-1) + x_j, and a loss on every state, against one graph."""
    inputs = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    whole = torch.zeros((), dtype=torch.float64)
    value = torch.zeros((), dtype=torch.float64)
    for x in inputs:
        value = weight * value + x
        whole = whole + value.square()
    (expected,) = torch.autograd.grad(whole, weight)

    microbatch = state("qwen3_next")
    losses = []
    for index, span in enumerate(SPANS):
        cache = microbatch.chunk(index, span)
        before = cache.get_recurrent_state(0)
        value = (0.0 if before is None else weight * before) + inputs[index] + 0.0 * weight
        cache.update_recurrent_state(value, 0)
        losses.append(value.square())
    for index in (2, 1, 0):
        roots, gradients = microbatch.carried(index)
        assert len(roots) == (1 if index < 2 else 0)
        torch.autograd.backward([losses[index], *roots], [None, *gradients])
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=0)


def test_close_frees_everything() -> None:
    microbatch = state("qwen3_next")
    cache = microbatch.chunk(0, SPANS[0])
    keys, _ = cache.update(*keys_and_values(SPANS[0]), layer_idx=1)
    buffers = weakref.ref(keys.untyped_storage())
    recurrent = torch.ones(3)
    cache.update_recurrent_state(recurrent, 0)
    state_reference = weakref.ref(recurrent)
    del keys, recurrent
    assert state_reference() is not None
    assert buffers() is not None
    microbatch.close()
    assert state_reference() is None
    assert buffers() is None
    assert microbatch.buffer("attention", 1).nbytes() == 0
