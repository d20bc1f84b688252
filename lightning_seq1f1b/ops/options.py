"""What every kernel is told beside the tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_seq1f1b.ops.visibility import Visibility


@dataclass(frozen=True, eq=False)
class Options:
    """How scores come from queries and keys, and which of them count.

    Attributes:
        scale: scores are scale q.k.
        softcap: then s becomes softcap tanh(s / softcap); None for no cap.
        visible: scores of keys that a query does not see count as -infinity.
    """

    scale: float
    softcap: float | None = None
    visible: Visibility = field(default_factory=Visibility)
