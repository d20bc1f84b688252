"""The ops as torch sees them: schema, meta kernel, autograd, compilation, and what bad arguments do."""

from __future__ import annotations

import pytest
import torch
from support.attention_cases import inputs, with_gradients
from torch import Tensor

from lightning_seq1f1b.ops import library
from lightning_seq1f1b.ops.reference import reference_attention
from lightning_seq1f1b.ops.visibility import Visibility

FIRST_KEY = torch.tensor([[0, 0, 0, 5, 5], [2, 2, 2, 2, 2]], dtype=torch.int32)
KEY_MASK = torch.ones(2, 9, dtype=torch.bool).index_put((torch.tensor(0), torch.tensor(1)), torch.tensor(False))
OPTIONS = {
    "plain": (0.3, 0, 0.0, None, None),
    "window and cap": (0.3, 4, 1.5, None, None),
    "documents and padding": (0.3, 0, 0.0, FIRST_KEY, KEY_MASK),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return inputs(5, 9, size=8, value_size=6, dtype=dtype)


def backward_arguments(options: tuple[object, ...], dtype: torch.dtype = torch.float64) -> tuple[object, ...]:
    query, key, value = (tensor.detach() for tensor in tensors(dtype))
    output, lse = library.attend(query, key, value, *options)
    exact = torch.promote_types(dtype, torch.float32)
    gradients = (torch.ones(key.shape, dtype=exact), torch.ones(value.shape, dtype=exact))
    return (torch.randn_like(output), query, key, value, output, lse, *gradients, *options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_of_attention(options: tuple[object, ...], dtype: torch.dtype) -> None:
    # The tolerances are for the comparison of compiled and eager gradients, which are rounded once more or less.
    low = dtype in (torch.bfloat16, torch.float16)
    torch.library.opcheck(library.attend, (*tensors(dtype), *options), **({"atol": 0.1, "rtol": 0.1} if low else {}))
    torch.library.opcheck(library.attend_backward, backward_arguments(options, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck_of_buffers(dtype: torch.dtype) -> None:
    exact = torch.promote_types(dtype, torch.float32)
    chunk = torch.randn(1, 4, 2, 3, dtype=torch.float64).to(dtype).transpose(1, 2)
    torch.library.opcheck(library.append, (torch.zeros(1, 2, 9, 3, dtype=dtype), chunk, 2))
    torch.library.opcheck(library.accumulate, (torch.zeros(1, 2, 4, 3, dtype=exact), chunk))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradcheck(options: tuple[object, ...]) -> None:
    assert torch.autograd.gradcheck(lambda *given: library.attend(*given, *options)[0], tensors())


def test_gradcheck_through_three_chunks() -> None:
    """The keys of early chunks get their gradients from three attentions."""

    def chunked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        outputs = []
        for start, stop in ((0, 4), (4, 5), (5, 9)):
            seen = (key[:, :, :stop], value[:, :, :stop])
            outputs.append(library.attend(query[:, :, start:stop], *seen, 0.4, 0, 0.0, None, None)[0])
        return torch.cat(outputs, 2)

    given = inputs(9, 9, rows=1, size=4)
    assert torch.autograd.gradcheck(chunked, given)
    whole = reference_attention(*given, scale=0.4)
    torch.testing.assert_close(chunked(*given), whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_it_compiles_without_a_graph_break(options: tuple[object, ...], backend: str) -> None:
    def computed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return library.attend(query * 2, key, value, *options)[0].sin()

    given = tensors(torch.float32)
    compiled = torch.compile(computed, fullgraph=True, backend=backend)
    got = with_gradients(lambda: compiled(*given), *given)
    expected = with_gradients(lambda: computed(*given), *given)
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


def test_the_log_sum_exp() -> None:
    query, key, value = (tensor.detach() for tensor in tensors())
    _, lse = library.attend(query, key, value, *OPTIONS["documents and padding"])
    scores = query @ key.repeat_interleave(2, 1).mT * 0.3
    mask = Visibility(None, FIRST_KEY, KEY_MASK).dense(5, 9, torch.device("cpu"))
    torch.testing.assert_close(lse, scores.masked_fill(~mask, float("-inf")).logsumexp(-1), rtol=0, atol=1e-13)
    assert not lse.requires_grad


def test_a_query_that_sees_no_key_has_an_infinite_log_sum_exp_and_takes_no_part_in_the_backward() -> None:
    options = (0.3, 0, 0.0, None, torch.tensor([[False] * 6 + [True] * 3, [True] * 9]))
    gradient, query, key, value, output, lse, *_ = backward_arguments(options)
    assert (lse[0, :, :2] == float("inf")).all()
    assert not output[0, :, :2].any()
    key_gradient, value_gradient = torch.zeros_like(key), torch.zeros_like(value)
    got = library.attend_backward(gradient, query, key, value, output, lse, key_gradient, value_gradient, *options)
    assert not got[0, :, :2].any()
    assert not key_gradient[0, :, :6].any()
    assert torch.isfinite(value_gradient).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_backward_adds_to_accumulators_of_any_layout(dtype: torch.dtype) -> None:
    options = OPTIONS["window and cap"]
    arguments = backward_arguments(options, dtype)
    expected = torch.autograd.grad(library.attend(*(given := tensors(dtype)), *options)[0], given, arguments[0])
    key, value = arguments[2], arguments[3]
    exact = arguments[6].dtype
    buffers = [torch.full((2, 30, 5, size), 7.0, dtype=exact) for size in (8, 6)]
    views = [buffer[:, 11:20, 1:3].transpose(1, 2) for buffer in buffers]
    got = library.attend_backward(*arguments[:6], *views, *options)
    assert torch.equal(got, expected[0])
    for view, wanted, like in zip(views, expected[1:], (key, value), strict=True):
        torch.testing.assert_close((view - 7.0).to(like.dtype), wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)
    for buffer in buffers:
        buffer[:, 11:20, 1:3] = 7.0
        assert (buffer == 7.0).all()


def test_append_and_accumulate() -> None:
    buffer, chunk = torch.zeros(2, 3, 10, 4), torch.randn(2, 5, 3, 4).transpose(1, 2)
    library.append(buffer, chunk, 3)
    assert torch.equal(buffer[:, :, 3:8], chunk)
    assert not buffer[:, :, :3].any()
    assert not buffer[:, :, 8:].any()
    total = torch.ones(2, 3, 5, 4)
    library.accumulate(total, chunk.bfloat16())
    assert torch.equal(total, 1 + chunk.bfloat16().float())
