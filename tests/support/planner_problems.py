"""Random small problems for the planner, small enough to try every setting there is."""

from __future__ import annotations

import random

from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.estimate import Machine, Training
from lightning_seq1f1b.schedule.planner import Problem


def random_problem(seed: int) -> Problem:
    """Two or three ranks, up to six microbatches, four to seven layers; machines from fast to slow in each respect."""
    draw = random.Random(seed)
    hidden, heads = draw.choice([256, 512, 1024]), draw.choice([4, 8])
    shape = ModelShape(
        num_layers=draw.randint(4, 7),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=draw.choice([1, 2, 4]),
        head_dim=hidden // heads,
        intermediate_size=draw.choice([2, 3, 4]) * hidden,
        gated_mlp=draw.random() < 0.7,
        vocab_size=draw.choice([512, 8192, 32768]),
        tied_embeddings=draw.random() < 0.5,
    )
    machine = Machine(
        flops=draw.choice([1e12, 50e12]),
        attention_flops=draw.choice([0.5e12, 30e12]),
        peak_flops=100e12,
        memory=None,
        bandwidth=draw.choice([1e9, 50e9]),
        latency=draw.choice([0.0, 1e-5, 1e-4]),
        launch=draw.choice([0.0, 1e-5, 3e-4]),
    )
    length = draw.choice([1024, 4096, 16384, 65536])
    return Problem(
        shape=shape,
        num_ranks=draw.choice([2, 2, 3]),
        length=length,
        num_microbatches=draw.randint(1, 6),
        training=Training(trainable_share=draw.choice([1.0, 1.0, 0.01]), recompute=draw.random() < 0.3),
        machine=machine,
        multiple=16,
        shortest_chunk=length // 6,
    )
