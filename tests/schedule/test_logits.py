"""Which chunks have their logits computed in slices, and how long these are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.logits import SLICED_FROM, are_sliced, slice_length

VOCAB_SIZE = 128 * 1024


def test_large_vocabularies_are_sliced_and_small_ones_are_not() -> None:
    assert are_sliced(8192, VOCAB_SIZE)
    assert not are_sliced(8192, 512)
    assert not are_sliced(int(SLICED_FROM) // 4 // 1000, 1000)
    assert are_sliced(int(SLICED_FROM) // 4 // 1000 + 1, 1000)


@given(st.integers(1, 5000), st.integers(1, 8), st.integers(1, 5000), st.integers(1, 1 << 20))
def test_slices_are_as_few_as_their_size_allows_and_even(length: int, rows: int, vocab: int, size: int) -> None:
    part = slice_length(length, rows, vocab, size)
    assert 1 <= part <= length
    assert part == 1 or 4 * part * rows * vocab <= size
    count = -(-length // part)
    fewer = count - 1
    if fewer:
        assert 4 * -(-length // fewer) * rows * vocab > size
        assert part == -(-length // count)
