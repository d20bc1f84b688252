"""What fails on one rank is raised on all, each with what it can know of it."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from support.processes import run_processes

from lightning_seq1f1b.runtime.together import failing_together


def outcomes(rank: int) -> list[str]:
    """Of four blocks: all is well; a full disk on rank 1; an odd error on rank 0; both at once."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    seen = []
    for errors in ({}, {1: OSError(28, "full")}, {0: KeyError("odd")}, {0: ValueError("one"), 1: OSError("two")}):
        try:
            with failing_together(dist.group.WORLD, "saving"):
                if rank in errors:
                    raise errors[rank]
            seen.append("")
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
    return seen


def test_all_ranks_fail_together():
    first, second = run_processes(outcomes, 2)
    assert first == [
        "",
        "OSError: saving failed on pipeline rank 1: OSError: [Errno 28] full",
        "KeyError: 'odd'",
        "ValueError: one",
    ]
    assert second == [
        "",
        "OSError: [Errno 28] full",
        "RuntimeError: saving failed on pipeline rank 0: KeyError: 'odd'",
        "OSError: two",
    ]
