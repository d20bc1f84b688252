"""Token ranges of the chunks of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Span:
    """Tokens `start` up to, but not including, `stop` of a row."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def spans(lengths: Sequence[int]) -> tuple[Span, ...]:
    """The spans of consecutive chunks of these lengths, in tokens; the first starts at token 0."""
    stops = tuple(accumulate(lengths))
    return tuple(Span(stop - length, stop) for stop, length in zip(stops, lengths, strict=True))
