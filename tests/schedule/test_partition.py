"""Chunks cover the row, and cost the same where they should."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.costs import ModelShape, head_flops, layer_flops
from lightning_seq1f1b.schedule.partition import Partition, balanced, between, equal_cost, even, partition
from lightning_seq1f1b.schedule.spans import Span, spans

SMALL = ModelShape(30, 576, 9, 3, 64, 1536, True, 49152)
WINDOWED = ModelShape(12, 768, 12, 12, 64, 3072, False, 50257, sliding_window=64)
shapes = st.sampled_from([SMALL, WINDOWED])


def lengths(chunks: tuple[Span, ...]) -> list[int]:
    return [chunk.length for chunk in chunks]


def assert_covers(chunks: tuple[Span, ...], length: int, num_chunks: int) -> None:
    assert len(chunks) == num_chunks
    assert chunks[0].start == 0
    assert chunks[-1].stop == length
    assert all(before.stop == after.start for before, after in pairwise(chunks))
    assert min(lengths(chunks)) >= 1


def flops(shape: ModelShape, start: int, stop: int) -> float:
    return shape.num_layers * layer_flops(shape, start, stop) + head_flops(shape, start, stop)


@st.composite
def rows(draw: st.DrawFn, longest: int = 5000) -> tuple[int, int]:
    num_chunks = draw(st.integers(1, 12))
    return draw(st.integers(num_chunks, longest)), num_chunks


@given(st.lists(st.integers(0, 50), max_size=8))
def test_spans_lie_end_to_end(given_lengths: list[int]) -> None:
    chunks = spans(given_lengths)
    assert lengths(chunks) == given_lengths
    assert [chunk.start for chunk in chunks] == [sum(given_lengths[:index]) for index in range(len(given_lengths))]


@given(rows())
def test_even_chunks_differ_by_one_token_at_most(row: tuple[int, int]) -> None:
    chunks = even(*row)
    assert_covers(chunks, *row)
    assert max(lengths(chunks)) - min(lengths(chunks)) <= 1


@given(rows(), shapes, st.sampled_from([1, 2, 16, 96, 128]))
def test_balanced_chunks_cover_the_row_at_any_length(row: tuple[int, int], shape: ModelShape, multiple: int) -> None:
    assert_covers(balanced(*row, shape, multiple), *row)


@given(st.integers(1, 12), st.integers(50, 600), shapes)
def test_balanced_chunks_cost_the_same_to_a_token(num_chunks: int, tokens_a_chunk: int, shape: ModelShape) -> None:
    length = num_chunks * tokens_a_chunk
    share = flops(shape, 0, length) / num_chunks
    one_token = flops(shape, length - 1, length)
    costs = [flops(shape, chunk.start, chunk.stop) for chunk in balanced(length, num_chunks, shape)]
    assert costs[0] <= max(1.01 * share, share + one_token)
    assert all(abs(cost - share) <= one_token for cost in costs[1:])
    if costs[0] > share + one_token:  # what the others lose to rounding
        assert all(cost <= share * (1 + 1e-12) for cost in costs[1:])


@given(st.integers(20_000, 60_000), st.integers(1, 6), shapes, st.sampled_from([16, 96, 128]))
def test_balanced_chunks_start_at_multiples_near_the_exact_boundaries(
    length: int, num_chunks: int, shape: ModelShape, multiple: int
) -> None:
    exact = balanced(length, num_chunks, shape)
    rounded = balanced(length, num_chunks, shape, multiple)
    assert all(chunk.start % multiple == 0 for chunk in rounded)
    assert all(2 * abs(a.start - b.start) <= multiple for a, b in zip(exact, rounded, strict=True))


@given(rows(), shapes)
def test_balanced_chunks_get_shorter_along_the_row(row: tuple[int, int], shape: ModelShape) -> None:
    chunks = lengths(balanced(*row, shape))
    # Rounding takes up to a token from every chunk but the first, and gives it to the first.
    assert all(earlier >= later - 1 for earlier, later in pairwise(chunks))


def test_the_multiple_shrinks_for_short_rows() -> None:
    assert lengths(balanced(2048, 4, SMALL, 128)) == [640, 512, 512, 384]
    assert lengths(balanced(101, 5, SMALL, 128)) == [16, 32, 16, 16, 21]
    assert lengths(balanced(101, 5, SMALL, 1)) == [21, 20, 20, 21, 19]
    assert lengths(balanced(5, 5, SMALL, 128)) == [1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("num_chunks", "expected"),
    [(4, [12295, 8190, 6600, 5683]), (8, [7058, 5241, 4366, 3822, 3442, 3157, 2932, 2750])],
)
def test_boundaries_of_the_reference_implementation(num_chunks: int, expected: list[int]) -> None:
    """The 1.3B model of the Seq1F1B paper at 32K tokens, under the cost function of its code.

    cost(s, P) = 4 s h V + L (8 s h n d + 4 s h f + (4 d + 3) n (s P - s^2 / 2)) for s tokens that end at token P, with
    GPT-2's vocabulary padded to 50304.
    """
    num_layers, hidden, heads, vocabulary = 24, 2048, 16, 50304
    head_dim, inner = hidden // heads, 4 * hidden

    def cost(start: int, stop: int) -> float:
        tokens = stop - start
        linear = 8 * tokens * hidden * heads * head_dim + 4 * tokens * hidden * inner
        attention = (4 * head_dim + 3) * heads * (tokens * stop - tokens**2 / 2)
        return 4 * tokens * hidden * vocabulary + num_layers * (linear + attention)

    assert lengths(equal_cost(32768, num_chunks, cost)) == expected


@given(rows(), shapes, st.floats(0, 1), st.sampled_from([1, 2, 16, 96, 128]))
def test_chunks_between_cover_the_row(row: tuple[int, int], shape: ModelShape, boundary: float, multiple: int) -> None:
    assert_covers(partition(boundary, *row, shape, multiple), *row)


@given(st.integers(20_000, 60_000), st.integers(1, 6), shapes, st.floats(0.01, 1), st.sampled_from([1, 96, 128]))
def test_boundaries_lie_that_far_on_the_way_from_even_to_balanced(
    length: int, num_chunks: int, shape: ModelShape, boundary: float, multiple: int
) -> None:
    chunks = partition(boundary, length, num_chunks, shape, multiple)
    ends = zip(even(length, num_chunks), balanced(length, num_chunks, shape), chunks, strict=True)
    for from_, to, chunk in ends:
        assert chunk.start % multiple == 0
        assert abs(chunk.start - (from_.start + boundary * (to.start - from_.start))) <= multiple / 2 + 1


def test_numbers_end_at_the_named_partitions() -> None:
    assert partition(0, 1000, 3, SMALL, 16) == partition(0.0, 1000, 3, SMALL, 16) == even(1000, 3)
    assert partition(1, 1000, 3, SMALL, 16) == partition(1.0, 1000, 3, SMALL, 16) == balanced(1000, 3, SMALL, 16)
    assert lengths(partition(0.5, 8192, 4, SMALL, 128)) == [2560, 2048, 1920, 1664]


def test_balance_is_of_the_cost_that_is_given() -> None:
    """Twice the cost for the first half of the row: a third of the tokens of the first half make a chunk of three."""

    def cost(start: int, stop: int) -> float:
        return 2 * (min(stop, 600) - min(start, 600)) + (max(stop, 600) - max(start, 600))

    assert lengths(between(1.0, 1200, 3, cost)) == [300, 300, 600]
    assert lengths(between(0.5, 1200, 3, cost)) == [350, 350, 500]


def test_named_partitions_and_lists() -> None:
    assert partition("even", 10, 3, SMALL, 4) == even(10, 3)
    assert partition("balanced", 1000, 3, SMALL, 16) == balanced(1000, 3, SMALL, 16)
    assert partition([5, 3, 2], 10, 3, SMALL, 4) == (Span(0, 5), Span(5, 8), Span(8, 10))
    assert partition((10,), 10, 1, SMALL, 1) == (Span(0, 10),)


@pytest.mark.parametrize(
    ("spec", "length", "num_chunks", "message"),
    [
        ("even", 3, 4, "3 tokens cannot make 4 chunks.*set num_chunks to 3 or less"),
        ("balanced", 3, 4, "3 tokens cannot make 4 chunks.*set num_chunks to 3 or less"),
        ("even", 3, 0, "num_chunks must be at least 1, not 0"),
        ("balance", 8, 2, "unknown partition 'balance', expected one of 'even', 'balanced'; did you mean 'balanced'?"),
        (
            "xyz",
            8,
            2,
            "unknown partition 'xyz', expected one of 'even', 'balanced', or give a number from 0",
        ),
        ([4, 3], 8, 2, r"\[4, 3\] add up to 7 tokens, but the rows have 8"),
        ([4, 4], 8, 3, "lists 2 chunk lengths, but num_chunks is 3"),
        ([8, 0], 8, 2, r"at least one token, but partition is \[8, 0\]"),
        ([9, -1], 8, 2, r"at least one token, but partition is \[9, -1\]"),
        ([], 8, 2, "lists 0 chunk lengths"),
        (1.5, 8, 2, "between 0 .even. and 1 .balanced., not at 1.5"),
        (-1, 8, 2, "between 0 .even. and 1 .balanced., not at -1"),
        (float("nan"), 8, 2, "not at nan"),
        (0.5, 3, 4, "3 tokens cannot make 4 chunks.*set num_chunks to 3 or less"),
    ],
)
def test_bad_partitions_are_refused(spec: Partition, length: int, num_chunks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        partition(spec, length, num_chunks, SMALL, 1)


def test_a_multiple_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple must be at least 1 token, not 0"):
        balanced(100, 2, SMALL, 0)
