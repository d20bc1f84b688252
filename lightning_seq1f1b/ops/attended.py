"""What the forward of an attention leaves for its backward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Attended(NamedTuple):
    """Inputs and results of `attend`, as `ops.library` describes them.

    Attributes:
        query: [rows, heads, queries, size].
        key: [rows, KV heads, keys, size].
        value: [rows, KV heads, keys, value size].
        output: [rows, heads, queries, value size].
        lse: [rows, heads, queries], float32, or float64 for float64. Output and log-sum-exp may have been merged with
            further terms, such as sinks; the backward is then that of the merged attention.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lse: Tensor
