"""Attention on a GPU in one run of a few minutes: right, then how fast. No test that pytest collects: it needs a GPU.

    python tests/gpu/check_attention.py --json build/gpu/attention.json

1. Every kernel that is there against the slow twin in float64, with every option it has, and in chunks through the KV
   buffer: output and gradients.
2. torch's opcheck of the package's ops on CUDA tensors, and a read of a stream other than the default one.
3. Chunked attention against torch's flash attention on the whole sequence: time and peak memory, forward and backward.

It prints one table, and ends with status 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_seq1f1b.ops import library, native
from lightning_seq1f1b.ops.kernel_attention import kernel_attention
from lightning_seq1f1b.ops.kernels import NATIVE, Call, Kernel, fast_kernels
from lightning_seq1f1b.ops.options import Options
from lightning_seq1f1b.ops.reference import reference_attention
from lightning_seq1f1b.ops.visibility import Visibility
from lightning_seq1f1b.runtime.kv_buffer import KVBuffer, appended
from lightning_seq1f1b.schedule.partition import even
from lightning_seq1f1b.schedule.spans import spans

CUDA = torch.device("cuda")
OPTIONS: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "plain": lambda rows, queries, keys: {},
    "sinks": lambda rows, queries, keys: {},
    "window": lambda rows, queries, keys: {"visible": Visibility(window=37)},
    "softcap": lambda rows, queries, keys: {"softcap": 2.0},
    "documents": lambda rows, queries, keys: {
        "visible": Visibility(
            first_key=(torch.arange(keys - queries, keys, device="cuda") // 50 * 50).int().expand(rows, -1).contiguous()
        )
    },
    "padding": lambda rows, queries, keys: {
        "visible": Visibility(key_mask=torch.arange(keys, device="cuda").expand(rows, -1) >= 20)
    },
}
SHAPES = [  # rows, heads, KV heads, queries, keys, size, value size
    (1, 1, 1, 1, 1, 64, 64),
    (2, 4, 2, 65, 65, 64, 64),
    (1, 8, 1, 128, 515, 128, 128),
    (2, 6, 3, 200, 300, 80, 80),
    (1, 4, 4, 96, 1000, 256, 256),
    (1, 2, 1, 50, 77, 40, 40),
    (1, 4, 2, 70, 190, 192, 128),
]


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random numbers, laid out with heads inside tokens."""
    rows, heads, tokens, size = shape
    return torch.randn(rows, tokens, heads, size, device="cuda").to(dtype).transpose(1, 2)


def errors(kernel: Kernel, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """The largest error of every case, in units of the dtype's rounding times the largest entry."""
    for rows, heads, kv_heads, queries, keys, size, value_size in SHAPES:
        for name, make in OPTIONS.items():
            given = make(rows, queries, keys)
            options = Options(size**-0.5, **given)
            if kernel.lacks(Call(CUDA, dtype, size, value_size, keys, options)) is not None:
                continue
            sinks = torch.linspace(-1, 2, heads, device="cuda") if name == "sinks" else None
            tensors = [draw(rows, heads, queries, size, dtype=dtype), draw(rows, kv_heads, keys, size, dtype=dtype)]
            tensors.append(draw(rows, kv_heads, keys, value_size, dtype=dtype))
            gradient = draw(rows, heads, queries, value_size, dtype=dtype)
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            output = kernel_attention(*leaves, sinks, kernel, options, None)
            got = [output, *torch.autograd.grad(output, leaves, gradient)]
            exact = [tensor.double().requires_grad_() for tensor in tensors]
            truth = reference_attention(*exact, scale=options.scale, sinks=sinks, **given)
            wanted = [truth, *torch.autograd.grad(truth, exact, gradient.double())]
            yield {
                "kernel": kernel.name,
                "dtype": str(dtype),
                "shape": [rows, heads, kv_heads, queries, keys, size, value_size],
                "option": name,
                "roundings": worst(got, wanted, dtype),
            }


def worst(got: Sequence[Tensor], wanted: Sequence[Tensor], dtype: torch.dtype) -> float:
    """The largest error of several tensors, in units of the dtype's rounding times the largest entry of each."""
    pairs = zip(got, wanted, strict=True)
    error = max(float((a.detach().double() - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)
    return error / torch.finfo(dtype).eps


def chunk_errors(kernel: Kernel, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """The same for whole sequences in uneven chunks, through the KV buffer and its accumulators."""
    length, heads, kv_heads, size = 515, 8, 2, 64
    tensors = [draw(2, heads, length, size, dtype=dtype), *(draw(2, kv_heads, length, size, dtype=dtype) for _ in "kv")]
    gradient = draw(2, heads, length, size, dtype=dtype)
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    truth = reference_attention(*exact, scale=size**-0.5)
    wanted = [truth, *torch.autograd.grad(truth, exact, gradient.double())]
    for lengths in ((515,), (200, 1, 314), (100, 100, 100, 100, 115)):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        outputs = run_chunks(kernel, leaves, gradient, [slice(s.start, s.stop) for s in spans(lengths)])
        got = [torch.cat(outputs, 2), *(leaf.grad for leaf in leaves)]
        found = worst(got, wanted, dtype)
        yield {"kernel": kernel.name, "dtype": str(dtype), "chunks": list(lengths), "roundings": found}


def run_chunks(kernel: Kernel, leaves: Sequence[Tensor], gradient: Tensor, parts: Sequence[slice]) -> list[Tensor]:
    """Forward of all chunks and backward of all, last first; returns the outputs."""
    query, key, value = leaves
    buffer, outputs = KVBuffer(query.shape[2]), []
    for part in parts:
        keys, values = buffer.append(part.start, 0, key[:, :, part], value[:, :, part])
        options = Options(query.shape[3] ** -0.5)
        own = query[:, :, part]
        outputs.append(kernel_attention(own, keys, values, None, kernel, options, appended(keys, values)))
    for output, part in zip(reversed(outputs), reversed(parts), strict=True):
        output.backward(gradient[:, :, part])
    return outputs


def opchecks() -> None:
    """Torch's own checks of the ops, and their use on another stream; raises where something is wrong."""
    given = [draw(2, 4, 33, 64, dtype=torch.bfloat16), *(draw(2, 2, 70, 64, dtype=torch.bfloat16) for _ in range(2))]
    options = (0.125, 0, 0.0, None, None)
    torch.library.opcheck(library.attend, (*(t.requires_grad_() for t in given), *options), atol=0.1, rtol=0.1)
    given = [tensor.detach() for tensor in given]
    output, lse = library.attend(*given, *options)
    totals = [torch.zeros(2, 2, 70, 64, device="cuda") for _ in range(2)]
    torch.library.opcheck(library.attend_backward, (output, *given, output, lse, *totals, *options))
    buffer = torch.zeros(2, 2, 90, 64, device="cuda", dtype=torch.bfloat16)
    torch.library.opcheck(library.append, (buffer, given[1], 11))
    torch.library.opcheck(library.accumulate, (totals[0], given[1]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # what follows on this stream must wait for it
        scaled = [tensor * 2 for tensor in given]
        elsewhere, _ = library.attend(*scaled, *options)
    stream.synchronize()
    expected, _ = library.attend(*scaled, *options)
    if not torch.equal(elsewhere, expected):
        raise AssertionError("attention did not run on the current stream")


def timed(run: Callable[[], None], repeats: int) -> tuple[float, int]:
    """Best milliseconds of several runs, and the peak of allocated bytes above what was allocated before."""
    run()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    best = float("inf")
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop))
    return best, torch.cuda.max_memory_allocated() - held


def speed(kernel: Kernel | None, length: int, chunks: int, heads: int, kv_heads: int, size: int) -> dict[str, Any]:
    """Forward and backward of a sequence in chunks by a kernel; None: the whole sequence by torch."""
    query, gradient = (draw(1, heads, length, size, dtype=torch.bfloat16) for _ in range(2))
    key, value = (draw(1, kv_heads, length, size, dtype=torch.bfloat16) for _ in range(2))
    parts = [slice(span.start, span.stop) for span in even(length, chunks)]

    def run() -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        if kernel is not None:
            run_chunks(kernel, leaves, gradient, parts)
        else:
            F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True).backward(gradient)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        milliseconds, peak = timed(run, repeats=5)
    return {"kernel": "whole" if kernel is None else kernel.name, "chunks": chunks, "ms": milliseconds, "peak": peak}


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=32768, help="tokens of the timed sequence")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128, help="entries of a head")
    parser.add_argument("--limit", type=float, default=16.0, help="largest error allowed, in roundings")
    parser.add_argument("--json", type=Path, help="where to write everything")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device is visible to torch")
    torch.manual_seed(0)
    plain = Call(CUDA, torch.bfloat16, args.size, args.size, 1, Options(1.0))
    present = [kernel for kernel in fast_kernels("cuda") if kernel.lacks(plain) is None]
    for kernel in fast_kernels("cuda"):
        print(f"{kernel.name}: {kernel.lacks(plain) or 'present'}")
    if not present:
        sys.exit("no kernel for CUDA is there")
    cases = [
        case
        for kernel in present
        for dtype in (torch.bfloat16, torch.float16)
        for case in (*errors(kernel, dtype), *chunk_errors(kernel, dtype))
    ]
    wrong = [case for case in cases if not case["roundings"] <= args.limit]
    print(f"{len(cases)} cases, {len(wrong)} wrong; worst {max(case['roundings'] for case in cases):.1f} roundings")
    for case in wrong:
        print("wrong:", case)
    if NATIVE in present:
        opchecks()
        print(f"opcheck of the ops passed; extension: {native.build_info()}")
    shape = (args.heads, args.kv_heads, args.size)
    rows = [speed(None, args.seq_len, 1, *shape)]
    rows += [speed(kernel, args.seq_len, chunks, *shape) for kernel in present for chunks in args.chunks]
    print(f"\n{torch.cuda.get_device_name()}, {args.seq_len} tokens, heads {shape}, bfloat16, forward and backward")
    print("| kernel | chunks | ms | of whole | peak MiB |\n| --- | --- | --- | --- | --- |")
    for row in rows:
        row["ratio_whole"] = row["ms"] / rows[0]["ms"]
        print(
            f"| {row['kernel']} | {row['chunks']} | {row['ms']:.2f} | {row['ratio_whole']:.2f} "
            f"| {row['peak'] / 2**20:.0f} |"
        )
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": cases, "speed": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
