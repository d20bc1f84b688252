"""How many logits of a chunk exist at once: where they are many, the last stage computes them slice by slice."""

from __future__ import annotations

from math import ceil

SLICED_FROM = 2.0**25
"""Bytes of a chunk's logits, counted in float32, from which they are computed in slices and none of them is kept."""

CPU_SLICE = 2.0**26
"""Bytes of a slice's logits, counted in float32, on a CPU: enough for its matrix products to be as fast as whole ones.
A slice takes about three times as much: the logits, their softmax and its gradient."""

ACCELERATOR_SLICE = 2.0**29
"""The same on an accelerator, whose matrix products need about a thousand tokens to be fast."""

_WIDE = 4  # bytes of a float32


def are_sliced(tokens: int, vocab_size: int) -> bool:
    """Whether a chunk's logits are computed in slices.

    Args:
        tokens: of the chunk, in all rows.
        vocab_size: logits of a token.
    """
    return _WIDE * tokens * vocab_size > SLICED_FROM


def slice_length(length: int, rows: int, vocab_size: int, slice_bytes: float) -> int:
    """Tokens of a row in each slice but the last, which may be shorter; slices are as even as whole tokens allow.

    Args:
        length: tokens of a row of the chunk.
        rows: rows of the chunk.
        vocab_size: logits of a token.
        slice_bytes: bytes that a slice's logits take at most, counted in float32; one token of each row is allowed.
    """
    most = max(1, int(slice_bytes // (_WIDE * rows * vocab_size)))
    return ceil(length / ceil(length / most))
