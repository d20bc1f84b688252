"""Pipelines of this package against those of torch.distributed.pipelining: speed, memory, and equal numbers.

Run with `python -m benchmarks.pipeline` or `make bench-pipeline`. Two processes on gloo with one thread each train the
same small Llama-like stack on the same rows, every row a microbatch; all pipelines are interleaved in the same pair of
processes. For each of them:

- tokens_per_s: of the fastest round on the wall clock, which means nothing while other work shares the cores;
- simulated_s: the length of the step when both ranks have a core of their own: the thread CPU times of the units, the
  best of the rounds each, played through the order that was executed. The figure to trust on shared cores;
- peak_bytes: the most bytes that torch's CPU allocator had handed out at once during a first step, setting up included,
  on the rank with the most; weights and their gradients do not count;
- activation_of_formula, for this package: the most bytes of tensors alive between two actions of a rank, in relation to
  the formula. A/p is what was alive when the rank had forwarded its first microbatch and nothing else; the formula is
  (A/p)(1 + (p - 1)/(v k)) for even chunks, and for others A/p times the most tokens that the plan's order keeps in
  flight, over those of one microbatch. Keys and values are among both, the gradients of keys and values among the first
  only; weights and their gradients are among neither;
- bubble and bubble_predicted, for this package: the idle share of both ranks in the fastest round, from the wall clock;
  and that of the plan when its units take what a(sP - s^2/2) + bs + c gives for their s tokens that end at P, the
  three constants of each stage and kind of action fitted to the CPU times of all units in this run that share
  attention, dtype, microbatches and stages.

Loss and gradient norm must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.pipeline_contender import Job, Name
from benchmarks.pipeline_measure import DTYPES, measure
from benchmarks.pipeline_report import FLAGSHIP, table
from benchmarks.pipeline_stack import ATTENTIONS, Sizes
from lightning_seq1f1b.ops import native
from lightning_seq1f1b.runtime.topology import Topology, make_groups

NUM_RANKS = 2
OURS = (("seq1f1b", "even"), ("seq1f1b", "balanced"), (FLAGSHIP, "balanced"))


def names(microbatches: int, chunks: Sequence[int], attentions: Sequence[str]) -> list[Name]:
    """All pipelines that can run so many microbatches. Those of torch use its own attention."""
    found = [Name("torch.gpipe", "whole", 1, "plain")]
    if microbatches >= NUM_RANKS:
        found.append(Name("torch.1f1b", "whole", 1, "plain"))  # refuses fewer microbatches than stages
    found += [Name(schedule, "whole", 1, "plain") for schedule in ("torch.interleaved_1f1b", "torch.zbv")]
    for attention in attentions:
        for schedule, partition in OURS:
            found += [Name(schedule, partition, count, attention) for count in chunks]
    return found


@dataclass(frozen=True)
class Options:
    """What to measure."""

    sizes: Sizes
    dtypes: Sequence[str]
    microbatches: Sequence[int]
    chunks: Sequence[int]
    attentions: Sequence[str]
    rounds: int
    output: Path


def work(rank: int, options: Options, meeting: str) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=NUM_RANKS)
    groups = make_groups(Topology(rank, NUM_RANKS, NUM_RANKS), timedelta(minutes=30))
    rows = []
    for dtype in options.dtypes:
        for microbatches in options.microbatches:
            job = Job(rank, NUM_RANKS, options.sizes, DTYPES[dtype], microbatches)
            every = names(microbatches, options.chunks, options.attentions)
            group = measure(job, dtype, every, options.rounds, groups)
            rows += group
            if rank == 0:
                print(
                    f"\n{dtype}, {microbatches} microbatches of {options.sizes.length} tokens\n\n{table(group)}\n",
                    flush=True,
                )
                # After every group, so that a long run that is stopped has not measured in vain.
                options.output.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=Sizes.length, help="tokens of a row")
    parser.add_argument("--hidden", type=int, default=Sizes.hidden, help=f"width, a multiple of {Sizes.hidden}")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4], help="rows of a step")
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8], help="chunks of a row")
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    parser.add_argument("--rounds", type=int, default=5, help="the best of so many counts")
    parser.add_argument("--quick", action="store_true", help="a look: 2,048 tokens, float32, 2 microbatches, 2 rounds")
    parser.add_argument("--output", type=Path, default=Path("build/bench/pipeline.json"), help="where the rows go")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("at least one round")
    if "native" in args.attention and not native.available():
        parser.error(f"no native attention to measure: {native.reason()}; leave it out with --attention plain")
    if args.hidden < Sizes.hidden or args.hidden % Sizes.hidden:
        parser.error(f"--hidden is a multiple of {Sizes.hidden}, not {args.hidden}")
    sizes = replace(Sizes().wider(args.hidden), length=args.seq_len)
    options = Options(sizes, args.dtypes, args.microbatches, args.chunks, args.attention, args.rounds, args.output)
    if args.quick:
        options = replace(options, sizes=replace(sizes, length=2048), dtypes=["float32"], microbatches=[2], rounds=2)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of every start
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (options, f"{folder}/meeting"), nprocs=NUM_RANKS)
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes, written: {args.output}")


if __name__ == "__main__":
    main()
