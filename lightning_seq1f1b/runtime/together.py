"""Ranks that do something apart, of which each may fail, fail together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

_KINDS: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Failure:
    """What can be said on other ranks about an error.

    Attributes:
        kind: index of its class among those that are told apart.
        text: its class and message.
    """

    kind: int
    text: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Of an error on this rank."""
        kind = next((index for index, known in enumerate(_KINDS) if isinstance(error, known)), len(_KINDS) - 1)
        return cls(kind, f"{type(error).__name__}: {error}")

    def error(self, what: str) -> Exception:
        """The error to raise on another rank; `what` has failed."""
        return _KINDS[self.kind](f"{what}: {self.text}")


@contextmanager
def failing_together(group: dist.ProcessGroup, what: str, member: str = "pipeline rank") -> Iterator[None]:
    """Inside, an error on one rank is kept until all have come to the end of the block; then it is raised on all.

    The block must not wait for other ranks of the group.

    Args:
        group: a CPU group.
        what: what is done, for the message on the other ranks: "loading LlamaForCausalLM".
        member: what the numbers of the group's processes are.

    Raises:
        Exception: the rank's own where it failed; on the others an OSError, ValueError or RuntimeError with the text of
            the first rank's that failed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failures: list[Failure | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, None if error is None else Failure.of(error), group=group)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise failure.error(f"{what} failed on {member} {rank}")
