"""Predicted times and bytes of every unit, from the architecture and a machine or a profile of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from typing import TypeAlias

from lightning_seq1f1b.schedule import logits
from lightning_seq1f1b.schedule.costs import (
    ATTENTION_BACKWARD,
    LayerShape,
    ModelShape,
    PartCosts,
    alike,
    attended_pairs,
    flops_of_head,
    flops_of_layers,
)
from lightning_seq1f1b.schedule.memory_curve import UnitSizes
from lightning_seq1f1b.schedule.profile import Profile
from lightning_seq1f1b.schedule.spans import Span
from lightning_seq1f1b.schedule.unit_times import UnitTimes

_WIDE = 4  # bytes of a float32

_WEIGHT_GRAD_LAUNCHES = 0.25
"""The part of a backward's launches that is the weights' gradients: one product for each linear layer, nothing else."""


@dataclass(frozen=True)
class Machine:
    """What a device and its links reach in practice.

    Attributes:
        flops: FLOP/s of matrix products with weights.
        attention_flops: FLOP/s of attention.
        peak_flops: FLOP/s that the vendor names for the dtype, which model FLOPs utilisation is measured against.
        memory: bytes of one device; None when it is not known.
        bandwidth: bytes/s of a message from rank to rank.
        latency: seconds of a message of no size.
        launch: seconds that a pass over one layer takes for one unit however small the unit is.
        memory_bandwidth: bytes/s of the device's memory.
    """

    flops: float
    attention_flops: float
    peak_flops: float
    memory: float | None
    bandwidth: float
    latency: float
    launch: float
    memory_bandwidth: float = inf


_GIB = 2.0**30

MACHINES = {
    "a100": Machine(190e12, 160e12, 312e12, 80 * _GIB, 200e9, 20e-6, 400e-6, 1.6e12),
    "h100": Machine(550e12, 400e12, 989e12, 80 * _GIB, 300e9, 20e-6, 400e-6, 2.7e12),
    "h200": Machine(550e12, 400e12, 989e12, 141 * _GIB, 300e9, 20e-6, 400e-6, 3.8e12),
    "b200": Machine(1200e12, 800e12, 2250e12, 180 * _GIB, 600e9, 20e-6, 400e-6, 6.4e12),
    "l40s": Machine(170e12, 130e12, 362e12, 48 * _GIB, 20e9, 30e-6, 400e-6, 0.7e12),
    "cpu": Machine(60e9, 40e9, 100e9, None, 2e9, 100e-6, 300e-6, 10e9),
}
"""Machines by name: vendors' figures for dense bfloat16, memory and links inside a node, and what is usually reached of
them (about half of the FLOP/s, four fifths of the memory's bandwidth). Good enough to compare schedules; for seconds to
rely on, measure a profile. "cpu" stands for one core in float32."""


@dataclass(frozen=True)
class Training:
    """How a model is trained, as far as time and memory depend on it. The defaults are those of bfloat16 with Adam.

    Attributes:
        rows: rows of one microbatch.
        activation_bytes: bytes of an element of the activations.
        weight_bytes: bytes of a weight.
        gradient_bytes: bytes of a weight's gradient, as the step sums it: float32 for weights of less precision.
        optimizer_bytes: bytes of the optimizer's state for one weight.
        trainable_share: share of the weights that are trained; small for adapters.
        recompute: whether activations inside a layer are computed again in the backward.
        logits_slice: bytes of logits, counted in float32, that the last stage computes at once where a chunk has many,
            as a part of the chunk's backward, which keeps none. None: those of a chunk at once, kept for its backward.
    """

    rows: int = 1
    activation_bytes: float = 2
    weight_bytes: float = 2
    gradient_bytes: float = 4
    optimizer_bytes: float = 8
    trainable_share: float = 1.0
    recompute: bool = False
    logits_slice: float | None = logits.ACCELERATOR_SLICE

    def slices(self, length: int, vocab_size: int) -> bool:
        """Whether the logits of a chunk of `length` tokens a row are computed slice by slice."""
        return self.logits_slice is not None and logits.are_sliced(self.rows * length, vocab_size)


@dataclass(frozen=True)
class Resident:
    """Bytes that a rank holds from step to step."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def stage_layers(shape: ModelShape, layers: Sequence[int]) -> list[range]:
    """The layers of every stage, from how many each has.

    Raises:
        ValueError: if they are not as many as the model has, or a stage has none.
    """
    if sum(layers) != shape.num_layers or min(layers, default=0) < 1:
        raise ValueError(f"the layers of the stages {list(layers)} must be positive and add up to {shape.num_layers}")
    return [range(start, stop) for start, stop in pairwise((0, *accumulate(layers)))]


def unit_times(
    shape: ModelShape,
    layers: Sequence[int],
    spans: Sequence[Span],
    training: Training,
    machine: Machine,
    profile: Profile | None = None,
) -> UnitTimes:
    """Seconds of F, I and W of every chunk on every stage.

    From FLOPs: products with weights and attention each at what the machine reaches, the bytes that the loss moves, and
    a time for each layer that no unit is too small for. From a profile: its fits, where layers are larger than the mean
    layer, or of another window, in proportion. Whatever is computed again counts as part of I.

    Args:
        shape: the architecture.
        layers: number of layers of every stage.
        spans: the chunks of a row.
        training: how it is trained.
        machine: what it runs on.
        profile: measured times to use in place of FLOPs; it knows the machine, and the dtype.

    Raises:
        ValueError: if `layers` do not add up to the model's.
    """
    seconds = _seconds_of(shape, training, machine, profile)
    stages = stage_layers(shape, layers)
    last = len(stages) - 1
    table = [[seconds(mine, span, stage == 0, stage == last) for span in spans] for stage, mine in enumerate(stages)]
    forward, input_grad, weight_grad = (tuple(tuple(unit[part] for unit in row) for row in table) for part in range(3))
    return UnitTimes(forward, input_grad, weight_grad)


def part_seconds(
    shape: ModelShape, length: int, training: Training, machine: Machine, profile: Profile | None = None
) -> PartCosts:
    """Seconds of forward and backward of every layer and of what is before and behind them, for one whole row.

    What `balanced_layers` takes to balance times instead of FLOPs. Arguments as those of `unit_times`.
    """
    seconds = _seconds_of(shape, training, machine, profile)
    row = Span(0, length)

    @cache
    def of_layer(layer: LayerShape) -> float:
        index = next(index for index in range(shape.num_layers) if shape.layer(index) == layer)
        return sum(seconds(range(index, index + 1), row, False, False))

    layers = tuple(of_layer(shape.layer(index)) for index in range(shape.num_layers))
    nothing = range(0)
    return PartCosts(layers, sum(seconds(nothing, row, True, False)), sum(seconds(nothing, row, False, True)))


_Seconds: TypeAlias = Callable[[range, Span, bool, bool], tuple[float, float, float]]
"""(layers, chunk, with what is before them, with what is behind them) -> seconds of F, I, W."""


def _seconds_of(shape: ModelShape, training: Training, machine: Machine, profile: Profile | None) -> _Seconds:
    return _from_flops(shape, training, machine) if profile is None else _from_profile(shape, training, profile)


def _from_flops(shape: ModelShape, training: Training, machine: Machine) -> _Seconds:
    casts = training.activation_bytes < _WIDE
    # Elements of the logits, read and written: to float32 and back, softmax and its gradient, the gradient of its
    # input's choice. Counted in torch's kernels: log_softmax reads twice and writes, its backward reads two and writes.
    to_wide = training.activation_bytes + _WIDE if casts else 0.0
    loss_forward, loss_backward = 3 * _WIDE + to_wide, 4 * _WIDE + to_wide
    share = training.trainable_share

    def time(linear: float, attention: float = 0.0) -> float:
        return training.rows * (linear / machine.flops + attention / machine.attention_flops)

    def seconds(mine: range, span: Span, first: bool, last: bool) -> tuple[float, float, float]:
        inside = flops_of_layers(shape, mine, span.start, span.stop)
        head = flops_of_head(shape, span.start, span.stop).linear if last else 0.0
        moved = training.rows * span.length * shape.vocab_size / machine.memory_bandwidth if last else 0.0
        behind = time(head) + loss_forward * moved
        late = last and training.slices(span.length, shape.vocab_size)
        launch = machine.launch * len(mine)
        forward = time(inside.linear, inside.attention) + launch
        again = forward if training.recompute else 0.0
        # The head's weight gradient is not put off: its output gradient is as large as the logits.
        inner = inside.linear + head + share * (inside.joint + head)
        backward = time(inner, ATTENTION_BACKWARD * inside.attention)
        return (
            forward + (0.0 if late else behind),
            again + (behind if late else 0.0) + backward + loss_backward * moved + (1 - _WEIGHT_GRAD_LAUNCHES) * launch,
            share * (time(inside.linear - inside.joint) + _WEIGHT_GRAD_LAUNCHES * launch),
        )

    return seconds


def _from_profile(shape: ModelShape, training: Training, profile: Profile) -> _Seconds:
    scale = training.rows / profile.rows
    mean = sum(shape.layer(index).matrices for index in range(shape.num_layers)) / shape.num_layers

    def seconds(mine: range, span: Span, first: bool, last: bool) -> tuple[float, float, float]:
        tokens, pairs = scale * span.length, scale * attended_pairs(span.start, span.stop)

        def time(part: str, *, layers_only: bool = False) -> float:
            total = 0.0
            for layer, count in alike(shape, mine).items():
                seen = scale * attended_pairs(span.start, span.stop, layer.window)
                total += count * profile.layer[part](seen, tokens * layer.matrices / mean)
            for present, fits in ((first, profile.embedding), (last, profile.head)):
                total += fits[part](pairs, tokens) if present and not layers_only else 0.0
            return max(total, 0.0)

        again = time("forward", layers_only=True) if training.recompute else 0.0
        late = 0.0
        if last and training.slices(span.length, shape.vocab_size):
            late = max(profile.head["forward"](pairs, tokens), 0.0)
        return time("forward") - late, again + late + time("input_grad"), training.trainable_share * time("weight_grad")

    return seconds


def message_seconds(shape: ModelShape, span: Span, training: Training, machine: Machine) -> float:
    """Seconds that the hidden states of one chunk take from rank to rank."""
    size = training.rows * span.length * shape.hidden_size * training.activation_bytes
    return machine.latency + size / machine.bandwidth


def unit_sizes(shape: ModelShape, layers: Sequence[int], spans: Sequence[Span], training: Training) -> UnitSizes:
    """Bytes that every unit holds, see `UnitSizes`.

    Activations are what autograd keeps, what a stage received and what it sent; on the last stage the softmax of the
    logits in float32, unless they are computed slice by slice. With recomputation they are the layers' inputs. The keys
    and values of a whole row are written down for its first chunk, whose forward makes the buffers, and their
    gradients, float32, for its last one, whose backward makes the accumulators.

    Args:
        shape: the architecture.
        layers: number of layers of every stage.
        spans: the chunks of a row.
        training: how it is trained.

    Raises:
        ValueError: if `layers` do not add up to the model's.
    """
    stages = stage_layers(shape, layers)
    tokens = [training.rows * span.length for span in spans]
    narrow, wide = training.activation_bytes, max(training.activation_bytes, _WIDE)
    activations, deferred, keys_values = [], [], []
    for stage, mine in enumerate(stages):
        kept, linear = _bytes_of_token(shape, mine, stage > 0, stage == len(stages) - 1, training)
        kv_width = sum(count * layer.kv_width for layer, count in alike(shape, mine).items())
        written = [0.0] * len(spans)
        written[0] += narrow * kv_width * sum(tokens)
        written[-1] += wide * kv_width * sum(tokens)
        behind = 0.0 if stage < len(stages) - 1 else wide * shape.vocab_size
        activations.append(
            tuple(
                length * (kept + (0.0 if training.slices(span.length, shape.vocab_size) else behind))
                for span, length in zip(spans, tokens, strict=True)
            )
        )
        deferred.append(tuple(linear * length for length in tokens))
        keys_values.append(tuple(written))
    return UnitSizes(tuple(activations), tuple(deferred), tuple(keys_values))


def _bytes_of_token(
    shape: ModelShape, mine: range, receives: bool, last: bool, training: Training
) -> tuple[float, float]:
    """Bytes of one token that a stage holds from F to I, and from I to W."""
    narrow, wide, hidden = training.activation_bytes, max(training.activation_bytes, _WIDE), shape.hidden_size
    kinds = alike(shape, mine).items()
    if training.recompute:
        kept = float(narrow * hidden * len(mine))
    else:
        kept = sum(count * (narrow * layer.saved + wide * layer.saved_wide) for layer, count in kinds)
        # In float32 a norm keeps what it was given, in less a copy in float32.
        kept += narrow * hidden if receives and narrow < _WIDE else 0.0
    linear = sum(count * (layer.linear_inputs + layer.linear_outputs) for layer, count in kinds)
    if last:
        kept += narrow * 2 * hidden + wide * hidden
    else:
        kept += narrow * hidden
    return kept, float(narrow * linear) if training.trainable_share > 0 else 0.0


def transient_bytes(
    shape: ModelShape, layers: Sequence[int], spans: Sequence[Span], stage_to_rank: Sequence[int], training: Training
) -> list[float]:
    """Bytes that one action of every rank makes and frees again, at most: on top of what its units hold.

    Of a layer's backward: gradients of what its linear layers read and gave, and of the residual stream; with
    recomputation, what autograd keeps of the layer, too. Of the last stage: the logits in the activations' dtype and in
    float32, in the forward beside their softmax and in the backward their gradients; where they are computed slice by
    slice, those of one slice and their softmax.

    Args:
        shape: the architecture.
        layers: number of layers of every stage.
        spans: the chunks of a row.
        stage_to_rank: the rank of every stage.
        training: how it is trained.
    """
    narrow, wide = training.activation_bytes, max(training.activation_bytes, _WIDE)
    longest = training.rows * max(span.length for span in spans)
    most = [0.0] * (max(stage_to_rank) + 1)
    stages = stage_layers(shape, layers)
    for stage, (rank, mine) in enumerate(zip(stage_to_rank, stages, strict=True)):
        for layer in alike(shape, mine):
            size = narrow * (layer.linear_outputs + 2 * shape.hidden_size)
            size += narrow * layer.saved + wide * layer.saved_wide if training.recompute else 0.0
            most[rank] = max(most[rank], longest * size)
        if stage == len(stages) - 1:
            most[rank] = max(most[rank], *(_transient_logits(shape, span.length, training) for span in spans))
    return most


def _transient_logits(shape: ModelShape, length: int, training: Training) -> float:
    narrow, wide = training.activation_bytes, max(training.activation_bytes, _WIDE)
    copies = wide + (narrow if narrow < _WIDE else 0.0)
    if training.logits_slice is None or not training.slices(length, shape.vocab_size):
        return training.rows * length * shape.vocab_size * copies
    part = logits.slice_length(length, training.rows, shape.vocab_size, training.logits_slice)
    # The softmax, the gradient of its logarithm and that of the logits.
    return training.rows * part * shape.vocab_size * (wide + copies + wide)


def resident_bytes(
    shape: ModelShape, layers: Sequence[int], stage_to_rank: Sequence[int], training: Training
) -> list[Resident]:
    """Bytes of weights, gradients and optimizer state of every rank.

    The first stage holds the embedding and the last one the head; they are one where tied and on the same rank.

    Args:
        shape: the architecture.
        layers: number of layers of every stage.
        stage_to_rank: the rank of every stage.
        training: how it is trained.
    """
    weights = [0.0] * (max(stage_to_rank) + 1)
    for rank, mine in zip(stage_to_rank, stage_layers(shape, layers), strict=True):
        weights[rank] += sum(count * layer.parameters for layer, count in alike(shape, mine).items())
    table = shape.hidden_size * shape.vocab_size
    weights[stage_to_rank[0]] += table
    if not (shape.tied_embeddings and stage_to_rank[0] == stage_to_rank[-1]):
        weights[stage_to_rank[-1]] += table
    share = training.trainable_share
    return [
        Resident(
            weights=training.weight_bytes * count,
            gradients=training.gradient_bytes * share * count,
            optimizer=training.optimizer_bytes * share * count,
        )
        for count in weights
    ]
