"""Chunks are shared out so that none carries more work than among alike microbatches."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.sharing_out import chunk_counts


@given(st.floats(1e-9, 1e15), st.integers(1, 64), st.integers(1, 64))
def test_equal_works_get_as_many_each(work: float, num_microbatches: int, num_chunks: int) -> None:
    assert chunk_counts([work] * num_microbatches, num_chunks) == (num_chunks,) * num_microbatches


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=9).filter(any), st.integers(1, 16))
def test_no_chunk_carries_more_and_no_microbatch_has_more_chunks_than_that_takes(
    works: list[int], num_chunks: int
) -> None:
    chunks = chunk_counts(works, num_chunks)
    alike = sum(works) / (len(works) * num_chunks)
    for work, count in zip(works, chunks, strict=True):
        assert count >= 1
        assert work / count <= alike * (1 + 1e-6)
        assert count == 1 or work / (count - 1) > alike
    assert sum(chunks) < len(works) * (num_chunks + 1)


def test_no_work_at_all_is_one_chunk_each() -> None:
    assert chunk_counts([0, 0.0], 4) == (1, 1)


@pytest.mark.parametrize("works", [[], [1, -1], [math.nan], [math.inf, 1]])
def test_works_that_are_none_are_refused(works: list[float]) -> None:
    with pytest.raises(ValueError, match="works must be finite numbers"):
        chunk_counts(works, 4)


def test_no_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="num_chunks must be at least 1, not 0"):
        chunk_counts([1], 0)
