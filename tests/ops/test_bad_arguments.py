"""The raw ops given what they cannot take: a message that says what was expected and what came, never a crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_cases import inputs
from torch import Tensor

from lightning_seq1f1b.ops import library, native

NAMES = ("query", "key", "value", "scale", "window", "softcap", "first_key", "key_mask")
BACKWARD_NAMES = ("gradient", *NAMES[:3], "output", "lse", "key_gradient", "value_gradient", *NAMES[3:])


def arguments() -> dict[str, Any]:
    """Of an attention that works, 2 rows, 4 heads, 2 KV heads, 5 queries, 9 keys, heads of 8 and 6."""
    query, key, value = (t.detach() for t in inputs(5, 9, size=8, value_size=6, dtype=torch.float32))
    first_key, key_mask = torch.zeros(2, 5, dtype=torch.int32), torch.ones(2, 9, dtype=torch.bool)
    return dict(zip(NAMES, (query, key, value, 0.3, 0, 0.0, first_key, key_mask), strict=True))


def backward_arguments() -> dict[str, Any]:
    found = arguments()
    found["output"], found["lse"] = library.attend(*(found[name] for name in NAMES))
    found["gradient"] = torch.ones_like(found["output"])
    found["key_gradient"], found["value_gradient"] = torch.zeros(2, 2, 9, 8), torch.zeros(2, 2, 9, 6)
    return {name: found[name] for name in BACKWARD_NAMES}


def changed(tensor: Tensor, dim: int, by: int) -> Tensor:
    """A tensor of the same kind, longer or shorter in one dimension."""
    shape = list(tensor.shape)
    shape[dim] = max(0, shape[dim] + by)
    return torch.zeros(shape, dtype=tensor.dtype)


BAD: dict[str, tuple[str, Callable[[Tensor], Any], str]] = {
    "query of three dimensions": ("query", lambda t: t[0], "query"),
    "key of another dtype": ("key", Tensor.double, "float64|[Dd]ouble"),
    "value of integers": ("value", Tensor.long, "int64|[Ll]ong"),
    "heads that do not divide": ("query", lambda t: t[:, :3].contiguous(), "multiple .* 3 and 2"),
    "rows that differ": ("key", lambda t: t[:1], r"key must be .*rows 2.* but is .*\[1, 2, 9, 8\]"),
    "a size that differs": ("key", lambda t: changed(t, 3, 1), r"key must be .*size 8.* but is .*\[2, 2, 9, 9\]"),
    "keys and values of different length": (
        "value",
        lambda t: changed(t, 2, -1),
        r"value must be .*keys 9.* but is .*\[2, 2, 8, 6\]",
    ),
    "fewer keys than queries": ("query", lambda t: changed(t, 2, 5), "holds 9 for 10 queries"),
    "a last stride of two": ("query", lambda t: torch.zeros(2, 4, 5, 16)[..., ::2], "stride"),
    "a negative window": ("window", lambda _: -1, "window"),
    "a negative soft-cap": ("softcap", lambda _: -1.0, "softcap|soft-cap"),
    "first keys of another dtype": ("first_key", Tensor.long, "first_key"),
    "first keys of another shape": ("first_key", lambda t: changed(t, 1, 1), "first_key"),
    "first keys with gaps": ("first_key", lambda t: torch.zeros(2, 10, dtype=torch.int32)[:, ::2], "first_key"),
    "a mask of another dtype": ("key_mask", Tensor.int, "key_mask"),
    "a mask of another shape": ("key_mask", lambda t: changed(t, 0, 1), "key_mask"),
}
BAD_BACKWARD: dict[str, tuple[str, Callable[[Tensor], Any], str]] = {
    "a gradient of another shape": ("gradient", lambda t: changed(t, 3, 1), "gradient"),
    "a gradient of another dtype": ("gradient", Tensor.double, "gradient"),
    "a gradient expanded from one number": ("gradient", lambda t: torch.ones(1, 1, 1, 1).expand(t.shape), "stride"),
    "an output of another shape": ("output", lambda t: changed(t, 2, -1), "output"),
    "a log-sum-exp of another dtype": ("lse", Tensor.bfloat16, "lse"),
    "a log-sum-exp of another shape": ("lse", lambda t: changed(t, 2, 1), "lse"),
    "accumulators of lower precision": ("key_gradient", Tensor.bfloat16, "key_gradient"),
    "accumulators that are too short": ("value_gradient", lambda t: changed(t, 2, -1), "value_gradient"),
    "accumulators with gaps": ("key_gradient", lambda t: torch.zeros(2, 2, 9, 16)[..., ::2], "stride"),
}


STRIDES = (
    "a last stride of two",
    "first keys with gaps",
    "a gradient expanded from one number",
    "accumulators with gaps",
)


@pytest.mark.parametrize("case", sorted((BAD | BAD_BACKWARD).keys() - set(STRIDES)))
def test_plain_torch_refuses_the_same(case: str) -> None:
    """But for strides, which do not matter to it."""
    name, change, _ = (BAD | BAD_BACKWARD)[case]
    given = arguments() if case in BAD else backward_arguments()
    given[name] = change(given[name])
    op = library._attend if case in BAD else library._attend_backward
    with pytest.raises(ValueError, match="must"):
        op(*given.values())


@pytest.mark.parametrize(("name", "change", "message"), BAD.values(), ids=BAD)
def test_the_forward_refuses(name: str, change: Callable[[Any], Any], message: str) -> None:
    assert native.available(), native.reason()
    given = arguments()
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=message):
        library.attend(*given.values())


@pytest.mark.parametrize(("name", "change", "message"), (BAD | BAD_BACKWARD).values(), ids=BAD | BAD_BACKWARD)
def test_the_backward_refuses(name: str, change: Callable[[Any], Any], message: str) -> None:
    given = backward_arguments()
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=message):
        library.attend_backward(*given.values())


@pytest.mark.parametrize(
    ("buffer", "chunk", "start", "message"),
    [
        ((1, 2, 9, 4), (1, 2, 4, 4), 6, "4 tokens put at 6 does not fit into a buffer of 9"),
        ((1, 2, 9, 4), (1, 2, 4, 4), -1, "4 tokens put at -1 does not fit into a buffer of 9"),
        ((1, 2, 9, 4), (1, 3, 4, 4), 0, r"heads 2.* but is .*\[1, 3, 4, 4\]"),
        ((1, 2, 9, 4), (1, 2, 4, 5), 0, r"size 4.* but is .*\[1, 2, 4, 5\]"),
        ((2, 9, 4), (2, 4, 4), 0, "four axes"),
    ],
    ids=["beyond the end", "before the start", "heads", "size", "dimensions"],
)
def test_append_refuses(buffer: tuple[int, ...], chunk: tuple[int, ...], start: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        library.append(torch.zeros(buffer), torch.zeros(chunk), start)
    with pytest.raises(ValueError, match=r"must|does not fit"):
        library._append(torch.zeros(buffer), torch.zeros(chunk), start)


def test_buffers_of_another_kind_are_refused() -> None:
    chunk = torch.zeros(1, 2, 4, 4)
    with pytest.raises(ValueError, match=r"float64|[Dd]ouble"):
        library.append(torch.zeros(1, 2, 9, 4).double(), chunk, 0)
    with pytest.raises(ValueError, match="total"):
        library.accumulate(torch.zeros(1, 2, 4, 4).bfloat16(), chunk)
    with pytest.raises(ValueError, match=r"part|shape"):
        library.accumulate(torch.zeros(1, 2, 5, 4), chunk)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool, torch.complex64]
TENSORS = st.builds(
    lambda shape, dtype, step: torch.ones(*shape[:-1], shape[-1] * step).to(dtype)[..., ::step],
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 1, 2]),
)
NUMBERS = st.sampled_from([0, 1, -1, 3, 2**31, -(2**63), 2**63 - 1])
FLOATS = st.sampled_from([0.0, 1.0, -1.0, 1e30, float("inf"), float("nan")])


@settings(max_examples=300, deadline=None)
@given(data=st.data(), backward=st.booleans())
def test_no_arguments_crash_it(data: st.DataObject, backward: bool) -> None:
    """Up to three arguments replaced by anything of their kind: it computes or raises."""
    given = backward_arguments() if backward else arguments()
    for name in data.draw(st.lists(st.sampled_from(list(given)), min_size=1, max_size=3, unique=True)):
        kind = {"scale": FLOATS, "softcap": FLOATS, "window": NUMBERS}.get(name, TENSORS)
        given[name] = data.draw(st.none() | kind if name in ("first_key", "key_mask") else kind)
    op = library.attend_backward if backward else library.attend
    try:
        results = op(*given.values())
    except (RuntimeError, ValueError, TypeError) as error:
        assert str(error)  # noqa: PT017 (both are right)
    else:
        assert all(isinstance(result, Tensor) for result in (results if isinstance(results, tuple) else [results]))


@settings(max_examples=100, deadline=None)
@given(buffer=TENSORS, chunk=TENSORS, start=NUMBERS)
def test_no_arguments_crash_append_and_accumulate(buffer: Tensor, chunk: Tensor, start: int) -> None:
    for op, passed in ((library.append, (buffer, chunk, start)), (library.accumulate, (buffer, chunk))):
        try:
            op(*passed)
        except (RuntimeError, ValueError, TypeError) as error:
            assert str(error)  # noqa: PT017 (both are right)
