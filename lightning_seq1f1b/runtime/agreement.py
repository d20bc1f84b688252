"""Makes sure that all pipeline ranks of a replica hold the same batch before any of it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

# The multipliers of splitmix64 as signed integers.
_ODD = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))

Fingerprint = dict[str, tuple[tuple[int, ...], str, int]]
"""Shape, dtype and checksum of every tensor of a batch."""


class BatchMismatchError(ValueError):
    """The pipeline ranks of one replica were given different batches."""


def fingerprint(batch: Mapping[str, Tensor]) -> Fingerprint:
    """What two batches are compared by; the checksum depends on every element and its place."""
    sums = _read({name: _checksum(tensor) for name, tensor in batch.items()})
    return {name: (tuple(tensor.shape), str(tensor.dtype), sums[name]) for name, tensor in batch.items()}


def _read(numbers: Mapping[str, Tensor]) -> dict[str, int]:
    """0-d tensors as integers, with one copy from each device they are on."""
    read: dict[str, int] = {}
    for device in {number.device for number in numbers.values()}:
        here = {name: number for name, number in numbers.items() if number.device == device}
        read |= zip(here, torch.stack(list(here.values())).tolist(), strict=True)
    return read


def _checksum(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    if flat.is_floating_point():
        flat = flat.double().view(torch.int64)
    places = torch.arange(flat.numel(), dtype=torch.int64, device=flat.device)
    # Each element is mixed with its place before the sum, or swaps and small integers would cancel (integers wrap).
    mixed = (flat.to(torch.int64) * _ODD[0]) ^ (places * _ODD[1])
    for odd in _ODD:
        mixed = (mixed ^ (mixed >> 29)) * odd
    return mixed.sum()


def check_same_batch(batch: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Compare this rank's batch with those of the other pipeline ranks.

    Args:
        batch: what this rank will cut.
        group: the pipeline's control group.

    Raises:
        BatchMismatchError: on every rank alike, naming the entry that differs and what each rank holds.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    seen: list[Fingerprint] = [{} for _ in range(size)]
    dist.all_gather_object(seen, fingerprint(batch), group=group)
    for name in sorted({name for one in seen for name in one}):
        entries = [one.get(name) for one in seen]
        if any(entry != entries[0] for entry in entries):
            held = "; ".join(f"rank {rank}: {_describe(entry)}" for rank, entry in enumerate(entries))
            raise BatchMismatchError(
                f"the pipeline ranks of one replica hold different batches: {name!r} is {held}. All stages must "
                "see the same samples in the same order: do not shard or shuffle a dataset by rank, seed what is "
                "random, or let the first stage hand its batch to the others with "
                "Seq1F1BStrategy(broadcast_batch=True)"
            )


def check_same_plan(identity: int, group: dist.ProcessGroup) -> None:
    """Compare what the pipeline ranks are about to execute.

    Args:
        identity: a 64-bit hash of the plan and the chunks, the same in every process.
        group: the pipeline's control group.

    Raises:
        ValueError: on every rank alike, when they differ.
    """
    here = torch.tensor([identity], dtype=torch.int64)
    identities = [torch.zeros_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(identities, here, group=group)
    held = [int(other) for other in identities]
    if len(set(held)) > 1:
        raise ValueError(
            "the pipeline ranks made different plans for the same batch (hashes "
            f"{', '.join(f'{other & 0xFFFFFFFF:08x}' for other in held)}): give the strategy the same arguments on all "
            "of them; with schedule='auto' and devices that differ, set schedule, virtual_stages and num_chunks"
        )


def lowest(number: int, group: dist.ProcessGroup) -> int:
    """The lowest of the pipeline ranks' numbers.

    Args:
        number: this rank's.
        group: the pipeline's control group.
    """
    if dist.get_world_size(group) == 1:
        return number
    shared = torch.tensor([number], dtype=torch.int64)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN, group=group)
    return int(shared)


def check_same_loss(loss: Tensor, group: dist.ProcessGroup) -> None:
    """Compare the loss that the user's step made of the model's, which all pipeline ranks share.

    Args:
        loss: what backward is about to start from; its sum is compared.
        group: the pipeline's control group.

    Raises:
        ValueError: on every rank alike, when a term differs, such as a penalty on parameters of which each rank holds
            its own.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    here = loss.detach().to("cpu", torch.float64).sum().reshape(1)
    losses = [torch.zeros_like(here) for _ in range(size)]
    dist.all_gather(losses, here, group=group)
    if not all(torch.isclose(other, losses[0], rtol=1e-3, atol=1e-6, equal_nan=True) for other in losses):
        held = ", ".join(f"{float(other):.6g}" for other in losses)
        raise ValueError(
            f"training_step's loss differs between the stages: {held}. Each stage holds its own part of the model, so "
            "a term over self.parameters() or over one module sees a different part on every stage; use the "
            "optimizer's weight_decay, or add only what all stages can compute"
        )


class UnevenLoadersError(ValueError):
    """The data loaders of the processes have different numbers of batches."""


def check_same_length(kind: str, length: float | None, group: dist.ProcessGroup) -> None:
    """Compare how many batches the processes will take from a loader.

    Args:
        kind: of the loader, such as "train_dataloader".
        length: of this process's; None where it is not known.
        group: a CPU group of all processes.

    Raises:
        UnevenLoadersError: on every rank alike, when they differ.
    """
    here = torch.tensor([-1 if length is None else int(length)], dtype=torch.int64)
    lengths = [torch.zeros_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, here, group=group)
    by_rank = [int(each) for each in lengths]
    if len(set(by_rank)) > 1:
        _uneven(kind, [f"has {'no length' if each < 0 else f'{each} batches'}" for each in by_rank])


def check_same_progress(kind: str, batch: int, ended: bool, group: dist.ProcessGroup) -> None:
    """Compare how far the processes are with a loader whose length they cannot know.

    Args:
        kind: of the loader, such as "train_dataloader".
        batch: number of the batch that is due.
        ended: whether this process's loader has none any more.
        group: a CPU group of all processes.

    Raises:
        UnevenLoadersError: on every rank alike, when one has come to its end and another has not.
    """
    here = 2 * batch + ended
    bounds = torch.tensor([here, -here], dtype=torch.int64)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    if int(bounds[0]) == -int(bounds[1]):
        return
    held = [(kind, batch, ended)] * dist.get_world_size(group)
    dist.all_gather_object(held, (kind, batch, ended), group=group)
    same = len({kind for kind, _, _ in held}) == 1
    _uneven(
        kind if same else "dataloader",
        [
            f"{'' if same else f'({kind}) '}{'ended after' if ended else 'goes on after'} {batch} batches"
            for kind, batch, ended in held
        ],
    )


def _uneven(kind: str, by_rank: Sequence[str]) -> NoReturn:
    held = "; ".join(f"rank {rank} {what}" for rank, what in enumerate(by_rank))
    raise UnevenLoadersError(
        f"the {kind} has different lengths on different processes: {held}. Every process must take equally many "
        "batches, or some would wait for others: limit them with limit_train_batches, limit_val_batches, "
        "limit_test_batches or limit_predict_batches to what all have, or let the dataset repeat or leave out rows"
    )


def check_same_turn(inputs: Mapping[str, Tensor] | None, group: dist.ProcessGroup) -> None:
    """Compare what the pipeline ranks are about to generate from; a cheaper `check_same_batch`, for every token.

    Args:
        inputs: what this rank will run; None if it has come to the end of its text.
        group: the pipeline's control group.

    Raises:
        ValueError: on every rank alike, when they differ.
    """
    if dist.get_world_size(group) == 1:
        return
    shapes = [] if inputs is None else [size for tensor in inputs.values() for size in (tensor.ndim, *tensor.shape)]
    content = 0 if inputs is None else sum(_read({name: _checksum(tensor) for name, tensor in inputs.items()}).values())
    here = torch.tensor([inputs is None, hash(tuple(shapes)), content & 0x7FFFFFFFFFFFFFFF], dtype=torch.int64)
    turns = [torch.zeros_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(turns, here, group=group)
    if all(torch.equal(turn, turns[0]) for turn in turns):
        return
    ended = [rank for rank, turn in enumerate(turns) if turn[0]]
    if ended:
        what = f"rank {', '.join(map(str, ended))} has come to the end of its text, others have not"
    else:
        what = "their tokens, attention masks or positions differ"
    raise ValueError(
        f"the pipeline ranks of one replica generate different texts: {what}. Call generate with the same arguments on "
        "all of them; processors of logits and stopping criteria of your own must decide alike on all, not by a clock "
        "or by random numbers of a rank"
    )


def _describe(entry: tuple[tuple[int, ...], str, int] | None) -> str:
    if entry is None:
        return "missing"
    shape, dtype, checksum = entry
    return f"{list(shape)} {dtype.removeprefix('torch.')} (checksum {checksum & 0xFFFFFFFF:08x})"
