"""The simulator against published iteration times and memory of Seq1F1B on A100s, with two constants fitted.

Run with `python -m benchmarks.calibration`; it needs no GPU. Two constants, FLOP/s reached and seconds per unit and
layer, are fitted to the compute timers of the stage that has nothing but layers, with one and two chunks. Iteration
times, the other timers and all memory are then predicted. Every other constant is stated here with its origin, and none
is fitted. The published figures lie beside this file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.estimate import Machine, Training, message_seconds, resident_bytes, unit_times
from lightning_seq1f1b.schedule.memory_curve import UnitSizes, peaks
from lightning_seq1f1b.schedule.partition import equal_cost
from lightning_seq1f1b.schedule.plan import Plan, make_plan
from lightning_seq1f1b.schedule.simulate import simulate
from lightning_seq1f1b.schedule.spans import Span
from lightning_seq1f1b.schedule.unit_times import UnitTimes

PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
LAYERS, HIDDEN, HEADS, INNER = (PUBLISHED[name] for name in ("layers", "hidden", "heads", "ffn"))
LENGTH, STAGES, REPLICAS, MICROBATCHES = (PUBLISHED[name] for name in ("seq_len", "pipeline", "data", "microbatches"))
LAYERS_PER_STAGE = LAYERS // STAGES

# The vocabulary of GPT-2, padded as Megatron pads it. The logs do not name it, but their TFLOPS are the FLOPs of the
# code's own formula (`code_flops`) with it, to 0.1 %.
VOCABULARY = 50304

# Reached of the A100's 2039 GB/s of memory and 300 GB/s of NVLink in each direction: the usual four fifths.
MEMORY_BANDWIDTH, LINK_BANDWIDTH, LINK_LATENCY = 1.6e12, 240e9, 20e-6

# Bytes that Megatron's cross-entropy moves for an element of the logits. Forward: to float32 (6), maximum (4),
# difference (8), exponential (8), sum (4), division (8). Backward: times the gradient (8), to bfloat16 (6).
LOSS_FORWARD_BYTES, LOSS_BACKWARD_BYTES = 38, 14

# Bytes of weights (bfloat16), gradients (float32) and Adam's master weights and two moments (12, sharded over the
# replicas) for one parameter. That they are sharded shows in what the first stage holds beyond the second.
WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12 / REPLICAS

# Bytes, in units of the hidden size, that a layer of a GPT keeps of a token: 34 as Korthikanti et al. count them
# (arXiv 2205.05198, without the attention matrix, which FlashAttention does not keep); keys and values of all chunks so
# far beside that (2 + 2, bfloat16), from two chunks on; and what the backward of one layer makes and frees again: four
# gradients of the hidden states (2 each) and two of the MLP's inside (8 each).
KEPT, KEYS_VALUES, TRANSIENT = 34, 4, 24

# Bytes of a logit: its softmax in float32 until the backward; and in the forward the bfloat16 logits, and the float32
# ones before the difference.
LOGIT_KEPT, LOGIT_TRANSIENT = 4, 6

SHAPE = ModelShape(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=HIDDEN // HEADS,
    intermediate_size=INNER,
    gated_mlp=False,
    vocab_size=VOCABULARY,
)
TRAINING = Training(
    rows=1,
    activation_bytes=2,
    weight_bytes=WEIGHT_BYTES,
    gradient_bytes=GRADIENT_BYTES,
    optimizer_bytes=OPTIMIZER_BYTES,
    logits_slice=None,  # that code keeps them
)
MACHINE = Machine(
    flops=1.0,
    attention_flops=1.0,
    peak_flops=312e12,
    memory=80 * 2.0**30,
    bandwidth=LINK_BANDWIDTH,
    latency=LINK_LATENCY,
    launch=0.0,
)
SPLIT = (LAYERS_PER_STAGE,) * STAGES


def code_flops(start: int, stop: int) -> float:
    """Forward FLOPs of a token range as the published code counts them, to cut rows and to report TFLOPS."""
    tokens, head_dim = stop - start, HIDDEN // HEADS
    linear = 8 * tokens * HIDDEN * HEADS * head_dim + 4 * tokens * HIDDEN * INNER
    attention = (4 * head_dim + 3) * HEADS * (tokens * stop - tokens**2 / 2)
    return 4 * tokens * HIDDEN * VOCABULARY + LAYERS * (linear + attention)


def chunks_of(num_chunks: int) -> tuple[Span, ...]:
    """The chunks of a row."""
    return equal_cost(LENGTH, num_chunks, code_flops)


def plan_of(num_chunks: int) -> Plan:
    """The plan of a step; with one chunk it is 1F1B."""
    return make_plan("seq1f1b", STAGES, MICROBATCHES, num_chunks)


def times_of(num_chunks: int, reached: float, launch: float) -> UnitTimes:
    """Seconds of every unit.

    Args:
        num_chunks: chunks of a row.
        reached: FLOP/s.
        launch: seconds of one pass over one layer beside that.
    """
    spans = chunks_of(num_chunks)
    machine = replace(MACHINE, flops=reached, attention_flops=reached, launch=launch)
    times = unit_times(SHAPE, SPLIT, spans, TRAINING, machine)
    logits = [span.length * VOCABULARY / MEMORY_BANDWIDTH for span in spans]

    def with_loss(table: tuple[tuple[Any, ...], ...], size: int) -> tuple[tuple[float, ...], ...]:
        last = tuple(time + size * seconds for time, seconds in zip(table[-1], logits, strict=True))
        return (*table[:-1], last)

    forward, input_grad = with_loss(times.forward, LOSS_FORWARD_BYTES), with_loss(times.input_grad, LOSS_BACKWARD_BYTES)
    return UnitTimes(forward, input_grad, times.weight_grad)


def seconds_of_update() -> float:
    """Seconds from the last backward to the next step, on the rank with most parameters.

    Half of the gradients go to the other replica and half of the weights come back. In memory: gradients are read for
    their norm and set to zero (8), and for this replica's half, read them (4), read and write master weights and
    moments (24), write weights (2).
    """
    parameters = (
        max(resident.weights for resident in resident_bytes(SHAPE, SPLIT, range(STAGES), TRAINING)) / WEIGHT_BYTES
    )
    links = parameters * (GRADIENT_BYTES + WEIGHT_BYTES) / REPLICAS / LINK_BANDWIDTH
    return links + parameters * (8 + 30 / REPLICAS) / MEMORY_BANDWIDTH


def seconds_of_step(num_chunks: int, reached: float, launch: float) -> float:
    """Simulated seconds of an iteration."""
    spans = chunks_of(num_chunks)
    message = sum(message_seconds(SHAPE, span, TRAINING, MACHINE) for span in spans) / len(spans)
    simulation = simulate(plan_of(num_chunks), times_of(num_chunks, reached, launch), message)
    return float(simulation.makespan) + seconds_of_update()


def predicted(num_chunks: int, reached: float, launch: float) -> dict[str, list[float]]:
    """What the logs have too: seconds of an iteration, and milliseconds of computing on the fastest, slowest stage."""
    times = times_of(num_chunks, reached, launch)
    forward = [1e3 * MICROBATCHES * float(sum(row)) for row in times.forward]
    backward = [
        1e3 * MICROBATCHES * float(sum(inputs) + sum(weights))
        for inputs, weights in zip(times.input_grad, times.weight_grad, strict=True)
    ]
    return {
        "iteration_s": [seconds_of_step(num_chunks, reached, launch)],
        "forward_ms": [min(forward), max(forward)],
        "backward_ms": [min(backward), max(backward)],
        "allocated_mib": [size / 2**20 for size in bytes_of_step(num_chunks)],
    }


def fit(runs: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """FLOP/s and seconds per unit and layer with which the fastest stage computes as long as published, in two runs.

    The fastest stage has nothing but layers. Its time is linear in seconds per FLOP and seconds per unit and layer.
    """

    def milliseconds(num_chunks: int, per_flop: float, launch: float) -> float:
        times = predicted(num_chunks, 1 / per_flop, launch)
        return times["forward_ms"][0] + times["backward_ms"][0]

    unit = 1e-12  # seconds per FLOP
    base = [milliseconds(run["chunks"], unit, 0.0) for run in runs]
    (a, b), (c, d) = (
        (milliseconds(run["chunks"], 2 * unit, 0.0) - less, milliseconds(run["chunks"], unit, 1.0) - less)
        for run, less in zip(runs, base, strict=True)
    )
    e, f = (run["forward_ms"][0] + run["backward_ms"][0] - less for run, less in zip(runs, base, strict=True))
    determinant = a * d - b * c
    return 1 / (unit + unit * (d * e - b * f) / determinant), (a * f - c * e) / determinant


def bytes_of_step(num_chunks: int) -> list[float]:
    """Bytes that every stage holds at most: what stays, what its units hold, and what one of them makes and frees."""
    spans = chunks_of(num_chunks)
    lengths = [span.length for span in spans]
    keeps_keys = num_chunks > 1

    def table(of_layer: float, of_logit: float) -> tuple[tuple[float, ...], ...]:
        inside = tuple(length * LAYERS_PER_STAGE * HIDDEN * of_layer for length in lengths)
        last = tuple(size + length * VOCABULARY * of_logit for size, length in zip(inside, lengths, strict=True))
        return (*(inside,) * (STAGES - 1), last)

    nothing = table(0.0, 0.0)
    sizes = UnitSizes(table(KEPT, LOGIT_KEPT), nothing, table(KEYS_VALUES * keeps_keys, 0.0))
    # That code keeps the keys and values of the last microbatch until the next step: of the whole row, and of its first
    # chunk, which it had before it joined the others to them.
    leaked = keeps_keys * (LENGTH + lengths[0]) * LAYERS_PER_STAGE * HIDDEN * KEYS_VALUES
    transient = [max(lengths) * HIDDEN * TRANSIENT] * STAGES
    transient[-1] = max(transient[-1], max(lengths) * VOCABULARY * LOGIT_TRANSIENT)
    parts = zip(
        resident_bytes(SHAPE, SPLIT, range(STAGES), TRAINING), peaks(plan_of(num_chunks), sizes), transient, strict=True
    )
    return [resident.total + peak + more + leaked for resident, peak, more in parts]


def main() -> None:
    """Print the comparison, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("build/bench/calibration.json"), help="output file")
    options = parser.parse_args()
    runs = PUBLISHED["runs"]
    reached, launch = fit(runs[:2])
    print(f"fitted: {reached / 1e12:.1f} TFLOP/s, {1e3 * launch:.2f} ms per unit and layer")
    rows: list[dict[str, Any]] = []
    largest: dict[str, float] = {}
    for run in runs:
        rows.append({"chunks": run["chunks"]})
        for name, values in predicted(run["chunks"], reached, launch).items():
            wanted = run[name] if isinstance(run[name], list) else [run[name]]
            errors = [value / published - 1 for value, published in zip(values, wanted, strict=True)]
            rows[-1][name] = {"simulated": values, "published": wanted, "error": errors}
            largest[name] = max(largest.get(name, 0.0), *map(abs, errors))
            texts = (
                ", ".join(format(number, form) for number in row) for row, form in ((values, ".5g"), (errors, "+.1%"))
            )
            simulated, percent = texts
            print(f"k={run['chunks']} {name:<14} {simulated:<30} published {run[name]} ({percent})")
    print(f"largest error of iteration times: {largest['iteration_s']:.1%}, bound 3%")
    print(f"largest error of allocated memory: {largest['allocated_mib']:.1%}, bound 10%")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"tflops_reached": reached / 1e12, "launch_ms": 1e3 * launch, "runs": rows}
    options.json.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
