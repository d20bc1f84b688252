"""Compares ops whose kernels are in the library that is named on the command line with plain steps of torch."""

import sys

import pytest
import torch

from lightning_seq1f1b.ops import library, plain
from lightning_seq1f1b.ops.attended import Attended
from lightning_seq1f1b.ops.options import Options
from lightning_seq1f1b.ops.visibility import Visibility

torch.ops.load_library(sys.argv[1])
ops = torch.ops.lightning_seq1f1b
torch.manual_seed(0)


def close(ours, exact, tolerance):
    assert (ours.float() - exact).norm() <= tolerance * exact.norm(), (ours.float() - exact).norm() / exact.norm()


def refused(part, op, *arguments):
    with pytest.raises(ValueError, match=part):
        op(*arguments)


rows, queries, keys = 2, 7, 19
for dtype, tolerance in ((torch.bfloat16, 6e-3), (torch.float16, 8e-4)):
    for heads, kv_heads, size, value_size, window, softcap, masked in (
        (4, 2, 24, 16, None, None, False),
        (2, 1, 64, 64, 5, 2.0, True),
        (3, 3, 72, 40, None, None, True),
    ):
        query = torch.randn(rows, queries, heads, size).to(dtype).transpose(1, 2)
        key = torch.randn(rows, kv_heads, keys + 3, size).to(dtype)[:, :, :keys]
        value = torch.randn(rows, kv_heads, keys, value_size).to(dtype)
        first_key = torch.randint(0, keys - queries, (rows, queries), dtype=torch.int32) if masked else None
        key_mask = torch.rand(rows, keys) > 0.3 if masked else None
        options = Options(0.2, softcap, Visibility(window, first_key, key_mask))
        arguments = library.arguments(options)
        output, lse = ops.attend(query, key, value, *arguments)
        wide = [tensor.float() for tensor in (query, key, value)]
        exact_output, exact_lse = plain.forward(*wide, options)
        close(output, exact_output, tolerance)
        torch.testing.assert_close(lse, exact_lse)
        gradient = torch.randn(rows, heads, queries, value_size).to(dtype)
        sums = torch.ones(rows, kv_heads, keys, size), torch.ones(rows, kv_heads, keys, value_size)
        exact_sums = sums[0].clone(), sums[1].clone()
        ours = ops.attend_backward(gradient, query, key, value, output, lse, *sums, *arguments)
        exact = plain.backward(gradient.float(), Attended(*wide, output.float(), lse), *exact_sums, options)
        for result, expected in zip((ours, *sums), (exact, *exact_sums), strict=True):
            close(result, expected, tolerance)
    chunk = torch.randn(rows, 5, 3, 8).to(dtype).transpose(1, 2)
    buffer = torch.zeros(rows, 3, 11, 8, dtype=dtype)
    ops.append(buffer, chunk, 4)
    assert torch.equal(buffer[:, :, 4:9], chunk)
    assert not buffer[:, :, :4].any()
    assert not buffer[:, :, 9:].any()
    total = torch.randn(rows, 3, 5, 8)
    expected = total + chunk.float()
    ops.accumulate(total, chunk)
    assert torch.equal(total, expected)

head = torch.zeros(1, 1, 1, 8)
wide_head = torch.zeros(1, 1, 1, 257, dtype=torch.bfloat16)
refused("on CUDA query must be bfloat16 or float16, but is float32", ops.attend, head, head, head, 1, 0, 0, None, None)
refused("at most 256 entries", ops.attend, wide_head, wide_head, wide_head, 1, 0, 0, None, None)
refused("on CUDA neither total nor part may be float64", ops.accumulate, head.double(), head)
empty = ops.attend(*[torch.zeros(1, 1, 0, 8, dtype=torch.bfloat16)] * 3, 1, 0, 0, None, None)
assert [tuple(tensor.shape) for tensor in empty] == [(1, 1, 0, 8), (1, 1, 0)]
