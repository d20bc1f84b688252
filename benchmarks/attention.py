"""Time of attention over a sequence in chunks, against torch's attention over the whole sequence at once.

Run with `python -m benchmarks.attention` or `make bench-attention`. Forward and backward on one thread, thread CPU
time, all ways interleaved in one process, the best of several rounds; only ratios within a run count. The ways:

- whole: `scaled_dot_product_attention(is_causal=True)` on the whole sequence.
- native: the extension, chunk by chunk, with the KV buffer of the runtime.
- masked: the same loop with torch's attention and a mask for every chunk.
- merged: the same loop with torch's kernels, prefix and chunk merged by their log-sum-exps: without the extension.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_seq1f1b.ops import native as extension
from lightning_seq1f1b.ops.kernel_attention import kernel_attention
from lightning_seq1f1b.ops.kernels import MERGED, NATIVE, Kernel
from lightning_seq1f1b.ops.masked import masked_attention
from lightning_seq1f1b.ops.options import Options
from lightning_seq1f1b.ops.visibility import Visibility
from lightning_seq1f1b.runtime.kv_buffer import KVBuffer, appended
from lightning_seq1f1b.schedule.partition import even

HEADS, SIZE = 8, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Seconds:
    """Thread CPU time of one pass over the sequence."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """Both."""
        return self.forward + self.backward

    def best(self, other: Seconds) -> Seconds:
        """The smaller of each."""
        return Seconds(min(self.forward, other.forward), min(self.backward, other.backward))


def whole(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> Seconds:
    """Torch's attention over the whole sequence."""
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    start = time.thread_time()
    output = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
    middle = time.thread_time()
    output.backward(gradient)
    return Seconds(middle - start, time.thread_time() - middle)


def chunked(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, chunks: int, attention: Attention) -> Seconds:
    """An attention chunk by chunk, first to last, and its backward, last to first, through a KV buffer."""
    length = query.shape[2]
    spans = [slice(span.start, span.stop) for span in even(length, chunks)]
    leaves = [[tensor[:, :, span].detach().requires_grad_() for tensor in (query, key, value)] for span in spans]
    buffer = KVBuffer(length)
    start = time.thread_time()
    outputs = []
    for span, (own_query, own_key, own_value) in zip(spans, leaves, strict=True):
        keys, values = buffer.append(span.start, 0, own_key, own_value)
        outputs.append(attention(own_query, keys, values))
    middle = time.thread_time()
    for span in reversed(spans):
        outputs.pop().backward(gradient[:, :, span])
    return Seconds(middle - start, time.thread_time() - middle)


def by(kernel: Kernel) -> Attention:
    """Attention by one of the package's kernels."""

    def computed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel_attention(query, key, value, None, kernel, Options(SIZE**-0.5), appended(key, value))

    return computed


def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention by torch with a mask."""
    return masked_attention(
        query, key, value, scale=SIZE**-0.5, visible=Visibility(), mask=None, bias=None, dropout=0.0
    )


def matmul_seconds(dtype: torch.dtype, size: int = 2048) -> float:
    """CPU time of one size^3 matrix product."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    start = time.thread_time()
    torch.mm(a, b)
    return time.thread_time() - start


def measure(
    dtype: str, length: int, kv_heads: Sequence[int], chunks: Sequence[int], rounds: int
) -> list[dict[str, Any]]:
    """Best seconds of every way; a row for each number of KV heads and chunks."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        # Heads inside tokens, as layers make them.
        return torch.randn(1, length, heads, SIZE, generator=generator).to(DTYPES[dtype]).transpose(1, 2)

    query, gradient = draw(HEADS), draw(HEADS)
    keys = {count: (draw(count), draw(count)) for count in kv_heads}
    ways: dict[tuple[str, int, int], Callable[[], Seconds]] = {}
    for count, (key, value) in keys.items():
        tensors = (query, key, value, gradient)
        ways["whole", count, 1] = lambda given=tensors: whole(*given)
        for number in chunks:
            for name, attention in (("native", by(NATIVE)), ("masked", masked), ("merged", by(MERGED))):
                ways[name, count, number] = lambda given=tensors, number=number, attention=attention: chunked(
                    *given, number, attention
                )
    best: dict[tuple[str, int, int], Seconds] = {}
    matmul = math.inf
    for turn in range(rounds):
        matmul = min(matmul, matmul_seconds(DTYPES[dtype]))
        for way, run in ways.items():
            seconds = run()
            best[way] = seconds.best(best.get(way, seconds))
        print(f"{dtype}: round {turn + 1} of {rounds}", flush=True)
    return [row(dtype, length, count, number, best, matmul) for count in kv_heads for number in chunks]


def row(
    dtype: str, length: int, kv_heads: int, chunks: int, best: dict[tuple[str, int, int], Seconds], matmul: float
) -> dict[str, Any]:
    """One line of the table. Operations count the causal half only: 2 products in the forward, 5 in the backward."""
    native = best["native", kv_heads, chunks]
    of_whole, of_masked, of_merged = (
        best["whole", kv_heads, 1],
        best["masked", kv_heads, chunks],
        best["merged", kv_heads, chunks],
    )
    product = HEADS * SIZE * length**2
    rate = 2 * 2048**3 / matmul
    return {
        "dtype": dtype,
        "seq_len": length,
        "kv_heads": kv_heads,
        "chunks": chunks,
        "ratio_whole": native.total / of_whole.total,
        "ratio_masked": native.total / of_masked.total,
        "ratio_merged": native.total / of_merged.total,
        "merged_whole": of_merged.total / of_whole.total,
        "forward_of_mm": 2 * product / native.forward / rate,
        "backward_of_mm": 5 * product / native.backward / rate,
        "variant": extension.cpu_variant(DTYPES[dtype]),
        "native_ms": native.total * 1e3,
        "whole_ms": of_whole.total * 1e3,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "dtype": lambda r: r["dtype"],
        "native": lambda r: r["variant"],
        "tokens": lambda r: str(r["seq_len"]),
        "KV heads": lambda r: str(r["kv_heads"]),
        "chunks": lambda r: str(r["chunks"]),
        "native / whole": lambda r: f"{r['ratio_whole']:.2f}",
        "native / masked": lambda r: f"{r['ratio_masked']:.2f}",
        "merged / whole": lambda r: f"{r['merged_whole']:.2f}",
        "forward, of mm": lambda r: f"{r['forward_of_mm']:.0%}",
        "backward, of mm": lambda r: f"{r['backward_of_mm']:.0%}",
    }
    lines = [columns, ["---"] * len(columns), *([show(r) for show in columns.values()] for r in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A bar chart of the times in relation to torch's whole-sequence attention."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    ways = {
        "native": lambda r: r["ratio_whole"],
        "merged": lambda r: r["merged_whole"],
        "masked": lambda r: r["ratio_whole"] / r["ratio_masked"],
    }
    for offset, (name, ratio) in enumerate(ways.items()):
        places = [index + (offset - 1) * 0.27 for index in range(len(rows))]
        bars = axes.bar(places, [ratio(r) for r in rows], width=0.25, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(
        range(len(rows)), [f"{r['dtype']}\n{r['kv_heads']} KV heads\n{r['chunks']} chunks" for r in rows], fontsize=7
    )
    axes.set_ylabel("time, torch on the whole sequence = 1")
    axes.set_title(f"Forward and backward of causal attention over {rows[0]['seq_len']} tokens in chunks")
    axes.set_ylim(top=1.15 * axes.get_ylim()[1])
    axes.legend(loc="upper center", ncols=len(ways))
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=8192, help="tokens")
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 16], help="numbers of chunks")
    parser.add_argument(
        "--kv-heads", type=int, nargs="+", default=[2, 8], help=f"numbers of KV heads; {HEADS} query heads"
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=5, help="the best of so many counts")
    parser.add_argument("--output", type=Path, default=Path("build/bench"), help="folder of attention.json and .png")
    args = parser.parse_args()
    if args.rounds < 1 or any(HEADS % count for count in args.kv_heads):
        parser.error(f"at least one round, and numbers of KV heads that divide {HEADS}")
    if not extension.available():
        parser.error(f"nothing to measure without the native kernels: {extension.reason()}")
    torch.set_num_threads(1)
    rows = [
        line for dtype in args.dtypes for line in measure(dtype, args.seq_len, args.kv_heads, args.chunks, args.rounds)
    ]
    print(table(rows))
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "attention.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, args.output / "attention.png")
    print(f"written: {args.output / 'attention.json'}, {args.output / 'attention.png'}")


if __name__ == "__main__":
    main()
