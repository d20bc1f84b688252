"""What an op writes to must not be what it reads: refused where the entries of two tensors overlap, and only there."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_seq1f1b.ops import library, native

OVERLAP = "must not share memory with"


@pytest.fixture(autouse=True)
def _kernels() -> None:
    assert native.available(), native.reason()


def is_refused(op: Callable[..., object], *arguments: object) -> bool:
    try:
        op(*arguments)
    except ValueError as error:
        assert OVERLAP in str(error)  # noqa: PT017 (whether it is raised is the question)
        return True
    return False


def addresses(tensor: Tensor) -> set[int]:
    """Of every byte of every entry."""
    size = tensor.element_size()
    entries = (
        sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
        for index in itertools.product(*map(range, tensor.shape))
    )
    return {tensor.data_ptr() + entry * size + byte for entry in entries for byte in range(size)}


def backward(key_gradient: Tensor, value_gradient: Tensor) -> None:
    key = torch.zeros(key_gradient.shape)
    output, lse = library.attend(key, key, key, 1.0, 0, 0.0, None, None)
    gradients = key_gradient, value_gradient
    library.attend_backward(output, key, key, key, output, lse, *gradients, 1.0, 0, 0.0, None, None)


@st.composite
def views(draw: st.DrawFn, memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Of a shape, with the axes in any order, gaps between them, and anywhere in the memory."""
    strides = [0, 0, 0, 1]
    run = shape[3] + draw(st.sampled_from([0, 0, 1, shape[3]]))
    for axis in draw(st.permutations(range(3))):
        strides[axis] = run
        run = run * shape[axis] + draw(st.sampled_from([0, 0, 1, 3]))
    last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    offset = draw(st.integers(0, min(60, memory.numel() - 1 - last)))
    return memory.as_strided(shape, strides, offset)


SHAPES = st.tuples(*[st.integers(1, 3)] * 4)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_accumulate_refuses_an_overlap_and_nothing_else(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    memory = torch.zeros(600)
    total, part = data.draw(views(memory, shape)), data.draw(views(memory.view(dtype), shape))
    assert is_refused(library.accumulate, total, part) == bool(addresses(total) & addresses(part))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=SHAPES, start=st.integers(0, 2))
def test_append_refuses_an_overlap_and_nothing_else(data: st.DataObject, shape: tuple[int, ...], start: int) -> None:
    memory = torch.zeros(800)
    rows, heads, tokens, size = shape
    buffer = data.draw(views(memory, (rows, heads, tokens + 2, size)))
    chunk = data.draw(views(memory, shape))
    written = buffer[:, :, start : start + tokens]
    assert is_refused(library.append, buffer, chunk, start) == bool(addresses(written) & addresses(chunk))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), shape=SHAPES)
def test_the_backward_refuses_accumulators_that_overlap_and_nothing_else(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    memory = torch.zeros(600)
    gradients = data.draw(views(memory, shape)), data.draw(views(memory, shape))
    assert is_refused(backward, *gradients) == bool(addresses(gradients[0]) & addresses(gradients[1]))


def test_keys_and_values_may_be_halves_of_one_tensor() -> None:
    both = torch.zeros(2, 3, 700, 2 * 40)
    key, value = both[..., :40], both[..., 40:]
    value += 1
    library.accumulate(key, value)
    assert (key == 1).all()
    backward(key, value)
    library.append(both[..., :40], both[:, :, 10:500, 40:], 50)


def test_a_buffer_may_be_extended_by_its_own_tokens() -> None:
    buffer = torch.arange(12.0).view(1, 1, 6, 2).clone()
    library.append(buffer, buffer[:, :, :3], 3)
    assert torch.equal(buffer[:, :, 3:], buffer[:, :, :3])
    with pytest.raises(ValueError, match=f"the part of buffer that is written to {OVERLAP} chunk"):
        library.append(buffer, buffer[:, :, :3], 2)


def test_any_stride_of_a_single_one_is_no_overlap() -> None:
    memory = torch.zeros(16)
    one, other = (memory.as_strided((1, 1, 1, 4), (2**60, 2**61, 2**59, 1), offset) for offset in (0, 4))
    library.accumulate(one, other)
    with pytest.raises(ValueError, match=f"total {OVERLAP} part"):
        library.accumulate(one, one)
