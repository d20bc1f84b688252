"""In which order a rank takes the forwards of its stages, and in which the backwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lightning_seq1f1b.schedule.codes import B, Codes, F, I


@dataclass(frozen=True)
class UnitOrders:
    """The two orders of one step, without saying how they mix.

    Stages are placed in a loop: stage s lies on rank s mod p. Forwards run group after group, a group through the
    rank's stages from first to last, and within a stage microbatch after microbatch, chunk after chunk. Backwards
    mirror that: groups and microbatches first in, first out, stages and chunks last in, first out.

    A group is one microbatch when that has as many chunks as there are ranks, or when a rank has one stage. Otherwise
    it is as many microbatches as give at least p units, so that no rank waits for the group to come around; what does
    not divide makes the first groups larger. Where microbatches differ, a group is as many as together hold no
    more than a group of the longest, so that none asks for more activations; some may have fewer than p units.

    Attributes:
        num_ranks: ranks of the pipeline, p.
        virtual_stages: stages on every rank, v.
        codes: the numbering.
        splits: whether the backwards are I rather than B.
    """

    num_ranks: int
    virtual_stages: int
    codes: Codes
    splits: bool

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        """The rank of every stage."""
        return tuple(stage % self.num_ranks for stage in range(self.num_ranks * self.virtual_stages))

    @property
    def length(self) -> int:
        """Forwards of one rank, and so also its backwards."""
        return self.virtual_stages * self.codes.units_on_a_stage

    @cached_property
    def groups(self) -> list[range]:
        """Microbatches of every group."""
        count, most = self.codes.num_microbatches, self.codes.num_chunks
        size = 1 if self.virtual_stages == 1 else -(-self.num_ranks // most)
        if self.codes.alike or self.virtual_stages == 1:
            number = max(1, count // size)
            bounds = [-(-index * count // number) for index in range(number + 1)]
        else:
            bounds = self._bounds(self._held(size * most, most))
        return [range(start, stop) for start, stop in pairwise(bounds)]

    def _bounds(self, most: int) -> list[int]:
        """The first microbatch of each group, and the end: every group gets what follows until it would hold more."""
        chunks, bounds = self.codes.chunks, [0]
        for microbatch in range(1, len(chunks)):
            group = chunks[bounds[-1] : microbatch + 1]
            if self._held(sum(group), max(group)) > most:
                bounds.append(microbatch)
        return [*bounds, len(chunks)]

    def _held(self, units: int, longest: int) -> int:
        """Units that the last rank holds before the first backward of a group of so many units on a stage."""
        return (self.virtual_stages - 1) * units + longest

    @property
    def before_the_first_backward(self) -> int:
        """Forwards that the last rank runs before it takes turns: before the first backward, it runs one more.

        With fewer, a later one would stand before a forward that it needs. The backwards of a microbatch begin with
        its last chunk on the rank's last stage, at which the forwards of its group on all stages but the last one, and
        its own on that, have run, while of this group no backward has.
        """
        groups = [self.codes.chunks[group.start : group.stop] for group in self.groups]
        return max(self._held(sum(group), max(group)) for group in groups) - 1

    def forwards(self, rank: int) -> list[int]:
        """Codes of the rank's forwards, in order."""
        return [8 * index + F for index in self._indices(rank, backward=False)]

    def backwards(self, rank: int) -> list[int]:
        """Codes of the rank's B or I, in order."""
        kind = I if self.splits else B
        return [8 * index + kind for index in self._indices(rank, backward=True)]

    def _indices(self, rank: int, *, backward: bool) -> Iterator[int]:
        stages = range(rank, self.num_ranks * self.virtual_stages, self.num_ranks)
        step = -1 if backward else 1
        for group in self.groups:
            for stage in stages[::step]:
                for microbatch in group:
                    first = self.codes.index(stage, microbatch, 0)
                    yield from range(first, first + self.codes.chunks[microbatch])[::step]
