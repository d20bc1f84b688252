"""Things worth saying once."""

from __future__ import annotations

import os
import warnings
from functools import cache


@cache
def say_once(message: str) -> None:
    """Warn, the first time a message comes up, and on a node's first rank only."""
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
        warnings.warn(message, UserWarning, stacklevel=2)
