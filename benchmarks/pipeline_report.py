"""The result of the pipeline benchmark for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

FLAGSHIP = "interleaved_seq1f1b_zb"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of one dtype and number of microbatches for people."""
    theirs = [line for line in rows if line["schedule"].startswith("torch.")]
    plain = next((line for line in theirs if line["schedule"] == "torch.1f1b"), None)

    def ratio(line: dict[str, Any], other: dict[str, Any] | None, entry: str) -> str:
        if other is None:
            return "-"
        gain = line[entry] / other[entry]
        return f"{gain if entry == 'tokens_per_s' else 1 / gain:.2f}x"

    fastest = max(theirs, key=lambda line: line["tokens_per_s"])
    shortest = min(theirs, key=lambda line: line["simulated_s"])
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "schedule": lambda r: r["schedule"],
        "chunks": lambda r: "1" if r["partition"] == "whole" else f"{r['chunks']} {r['partition']}",
        "attention": lambda r: r["attention"],
        "tokens/s": lambda r: f"{r['tokens_per_s']:.0f}",
        "of 1F1B": lambda r: ratio(r, plain, "tokens_per_s"),
        "of torch's best": lambda r: ratio(r, fastest, "tokens_per_s"),
        "simulated s": lambda r: f"{r['simulated_s']:.3f}",
        "of 1F1B, simulated": lambda r: ratio(r, plain, "simulated_s"),
        "of torch's best, simulated": lambda r: ratio(r, shortest, "simulated_s"),
        "peak MiB": lambda r: f"{r['peak_bytes'] / 2**20:.0f}",
        "of formula": lambda r: f"{r['activation_of_formula']:.2f}" if "bubble" in r else "-",
        "wall / simulated": lambda r: f"{r['step_s'] / r['simulated_s']:.2f}",
        "bubble, predicted": lambda r: f"{r['bubble']:.1%}, {r['bubble_predicted']:.1%}" if "bubble" in r else "-",
    }
    lines = [columns, ["---"] * len(columns), *([show(line) for show in columns.values()] for line in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def flagship_gains(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How much the split, interleaved schedule gains over `seq1f1b` with the same chunks and attention."""
    ours = {(line["schedule"], line["partition"], line["chunks"], line["attention"]): line for line in rows}
    lines = []
    for (schedule, *same), line in ours.items():
        other = ours.get(("seq1f1b", *same))
        if schedule == FLAGSHIP and other is not None:
            wall = line["tokens_per_s"] / other["tokens_per_s"]
            simulated = other["simulated_s"] / line["simulated_s"]
            cut = " ".join(str(part) for part in same)
            lines.append(f"{schedule} against seq1f1b, {cut}: {wall:.3f}x in time, {simulated:.3f}x simulated")
    return lines
