"""Checks the strategy's arguments when it is made, before any process is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeGuard

from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.policies import POLICIES
from lightning_seq1f1b.schedule.suggest import unknown


def check_arguments(
    num_stages: int | None,
    num_microbatches: int | Literal["auto"],
    num_chunks: int | Literal["auto"],
    schedule: str,
    partition: float | Sequence[int] | str,
    virtual_stages: int | Literal["auto"],
    memory_knob: int | None,
    activation_cap: int | None,
    layers: Sequence[int] | None,
    profile: str | None,
) -> None:
    """Raise ValueError for an argument of `Seq1F1BStrategy` that cannot work with any model or batch."""
    if num_stages is not None and not _is_count(num_stages):
        raise ValueError(f"num_stages must be at least 1, or None for all devices, not {num_stages!r}")
    for name, number in (("num_microbatches", num_microbatches), ("num_chunks", num_chunks)):
        if number != "auto" and not _is_count(number):
            raise ValueError(f'{name} must be a positive integer or "auto", not {number!r}')
    if virtual_stages != "auto" and not _is_count(virtual_stages):
        raise ValueError(f'virtual_stages must be a positive integer or "auto", not {virtual_stages!r}')
    for name, knob in (("memory_knob", memory_knob), ("activation_cap", activation_cap)):
        if knob is not None and not _is_count(knob):
            raise ValueError(f"{name} must be a positive integer, or None for the schedule's own, not {knob!r}")
    schedules = [name for name, policy in POLICIES.items() if policy.trains]
    if schedule not in (*schedules, "auto"):
        raise ValueError(unknown("schedule", schedule, (*schedules, "auto")))
    if layers is not None and not (isinstance(layers, Sequence) and layers and all(map(_is_count, layers))):
        raise ValueError(f"layers must list how many layers each stage has, at least one, not {layers!r}")
    chunks = _chunks(partition, num_chunks)
    if schedule == "auto":
        if activation_cap is not None:
            raise ValueError(
                f"activation_cap={activation_cap} is a knob of one schedule; leave it out with schedule='auto', which "
                "fits into the devices' memory, or name the schedule"
            )
        if profile is not None and not Path(profile).is_file():
            raise ValueError(
                f"profile={profile!r} is no file here; give the path of what `lightning-seq1f1b profile` wrote, or "
                "leave it out"
            )
        return
    if profile is not None:
        raise ValueError(f"profile={profile!r} is for schedule='auto', but the schedule is {schedule!r}; leave it out")
    # What a schedule does not support is refused for the smallest plan too.
    make_plan(
        schedule,
        1,
        1,
        chunks or 1,
        virtual_stages=1 if virtual_stages == "auto" else virtual_stages,
        memory_knob=memory_knob,
    )


def check_state_dict_type(state_dict_type: str) -> None:
    """Raise ValueError for a format of checkpoints that there is none."""
    if state_dict_type not in ("full", "sharded"):
        raise ValueError(unknown("state_dict_type", state_dict_type, ("full", "sharded")))


def _chunks(partition: float | Sequence[int] | str, num_chunks: int | Literal["auto"]) -> int | None:
    """The number of chunks, None where the row's length decides; the partition is checked."""
    if isinstance(partition, Sequence) and not isinstance(partition, str):
        if not partition or not all(map(_is_count, partition)):
            raise ValueError(f"partition must list the chunks' lengths, at least one token each, not {partition!r}")
        if num_chunks not in ("auto", len(partition)):
            raise ValueError(
                f"partition lists {len(partition)} chunks, but num_chunks={num_chunks}: leave num_chunks out, or make "
                "them agree"
            )
        return len(partition)
    if isinstance(partition, str):
        if partition not in ("balanced", "even"):
            raise ValueError(unknown("partition", partition, ("balanced", "even")))
    elif not _is_number(partition) or not 0 <= partition <= 1:
        raise ValueError(
            "partition must be a number from 0 (even) to 1 (balanced), 'even' or 'balanced', or list the chunks' "
            f"lengths, not {partition!r}"
        )
    return None if num_chunks == "auto" else num_chunks


def _is_count(number: object) -> bool:
    return isinstance(number, int) and _is_number(number) and number >= 1


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
