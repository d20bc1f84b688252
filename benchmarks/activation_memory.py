"""Peak activation bytes of the first stage: Seq1F1B against 1F1B on the same rows, counted, not resident memory.

Run with `python -m benchmarks.activation_memory`. All stages run as threads of one process, without process groups.
After every forward and backward of stage 0, all tensors that the stage's thread has made and that are still alive are
summed up, without parameters and their gradients: what autograd saved, keys, values, their gradients, received tensors.
"""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.live_bytes import LiveBytes, SampledTrace
from lightning_seq1f1b.models.shape import model_shape
from lightning_seq1f1b.models.split import cut
from lightning_seq1f1b.models.stage import make_stages
from lightning_seq1f1b.runtime.batching import cut_batch
from lightning_seq1f1b.runtime.executor import Executor
from lightning_seq1f1b.runtime.pipeline import Cutting
from lightning_seq1f1b.runtime.transport import InProcessTransport, Mailbox

NUM_LAYERS, VOCAB_SIZE = 8, 512


def model() -> LlamaForCausalLM:
    """A small Llama with grouped-query attention."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=1 << 16,
        )
    )


def first_stage_peak(cutting: Cutting, num_stages: int, rows: int, length: int) -> int:
    """Peak activation bytes of stage 0 in one training step."""
    shape = model_shape(model().config)
    spans = cutting.spans(length, num_stages, shape)
    plan = cutting.plan([len(spans)] * rows, num_stages, training=True)
    ids = torch.randint(0, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(0))
    microbatches = cut_batch({"input_ids": ids, "labels": ids}, cutting.num_microbatches, spans)
    per_stage = NUM_LAYERS // num_stages
    ranges = [range(stage * per_stage, (stage + 1) * per_stage) for stage in range(num_stages)]
    mailbox, peaks = Mailbox(), [0] * num_stages

    def run(rank: int) -> None:
        whole = model()
        stages = make_stages(cut(whole, [rank], ranges))
        for parameter in whole.parameters():
            parameter.grad = torch.zeros_like(parameter)
        executor = Executor(stages, InProcessTransport(mailbox, rank, 600.0), rank, torch.device("cpu"))
        if rank > 0:
            executor.run(plan, microbatches)
            return
        excluded = [tensor for p in whole.parameters() for tensor in (p, p.grad) if tensor is not None]
        with LiveBytes(excluded) as live:
            trace = SampledTrace(live)
            executor.run(plan, microbatches, trace)
        peaks[rank] = trace.peak

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return peaks[0]


def main() -> None:
    """Print one table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row (default: 2048)")
    parser.add_argument("--json", type=Path, default=Path("build/bench/activation_memory.json"), help="output file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'stages':>6} {'rows':>5} {'chunks':>6}  {'partition':<9} {'MiB':>8} {'of 1f1b':>8} {'tokens only':>12}")
    for num_stages in (2, 4):
        base = first_stage_peak(Cutting("1f1b", num_chunks=1), num_stages, 4, options.length)
        print(f"{num_stages:>6} {4:>5} {1:>6}  {'1f1b':<9} {base / 2**20:>8.1f} {1:>8.2f} {1:>12.2f}")
        for chunks, partition in ((4, "even"), (4, "balanced"), (8, "even"), (8, "balanced")):
            cutting = Cutting("seq1f1b", num_chunks=chunks, partition=partition, multiple=16)
            peak = first_stage_peak(cutting, num_stages, 4, options.length)
            formula = (num_stages - 1 + chunks) / chunks / num_stages
            print(
                f"{num_stages:>6} {4:>5} {chunks:>6}  {partition:<9} {peak / 2**20:>8.1f} {peak / base:>8.2f} "
                f"{formula:>12.2f}"
            )
            rows.append(
                {
                    "stages": num_stages,
                    "microbatches": 4,
                    "chunks": chunks,
                    "partition": partition,
                    "length": options.length,
                    "bytes": peak,
                    "bytes_1f1b": base,
                    "ratio": peak / base,
                }
            )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(rows, indent=2) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
