"""Checks the strategy's arguments when it is made, before any process is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_seq1f1b.runtime.pipeline import FORWARD_ONLY
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.suggest import unknown


def check_arguments(
    num_stages: int | None,
    num_microbatches: int | Literal["auto"],
    num_chunks: int | Literal["auto"],
    schedule: str,
    partition: str | Sequence[int],
) -> None:
    """Raise ValueError for an argument of `Seq1F1BStrategy` that cannot work with any model or batch."""
    if num_stages is not None and not _is_count(num_stages):
        raise ValueError(f"num_stages must be at least 1, or None for all devices, not {num_stages!r}")
    for name, number in (("num_microbatches", num_microbatches), ("num_chunks", num_chunks)):
        if number != "auto" and not _is_count(number):
            raise ValueError(f'{name} must be a positive integer or "auto", not {number!r}')
    schedules = [name for name in POLICIES if name != FORWARD_ONLY]
    if schedule not in schedules:
        raise ValueError(unknown("schedule", schedule, schedules))
    if isinstance(partition, str):
        if partition not in ("balanced", "even"):
            raise ValueError(unknown("partition", partition, ("balanced", "even")))
        chunks = num_chunks
    else:
        if not isinstance(partition, Sequence) or not partition or not all(map(_is_count, partition)):
            raise ValueError(
                f"partition must list the chunks' lengths, at least one token each, or be 'balanced' or 'even', not "
                f"{partition!r}"
            )
        chunks = len(partition)
        if num_chunks not in ("auto", chunks):
            raise ValueError(
                f"partition lists {chunks} chunks, but num_chunks={num_chunks}: leave num_chunks out, or make them "
                "agree"
            )
    if schedule == "1f1b" and chunks not in ("auto", 1):
        raise ValueError(
            f'schedule="1f1b" runs whole rows, so num_chunks must be 1, not {chunks}; use schedule="seq1f1b" for chunks'
        )


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1
