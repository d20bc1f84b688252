"""A run goes on in the middle of an epoch with any stages, virtual stages and replicas, from files of both formats."""

import functools
import itertools
import random

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.byte_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from support.processes import run_processes
from support.resuming import END, Counter, Resumable, assert_same_content
from support.training import QUIET

from lightning_seq1f1b import LongDocuments, Seq1F1BStrategy

LENGTH, ROWS, GLOBAL_BATCH = 13, 6, 2
EPOCH_STEPS = ROWS // GLOBAL_BATCH
SAVED_AT, LAST_STEP = EPOCH_STEPS + 1, 2 * EPOCH_STEPS + 2
"""One step into the second epoch, and one step before the end of the third."""

SHAPES = {1: [(1, 1, 1)], 2: [(2, 1, 1), (2, 2, 1)], 4: [(4, 1, 1), (2, 1, 2)]}
"""Stages, virtual stages and replicas, by their number of processes."""

ALL = [shape for shapes in SHAPES.values() for shape in shapes]
FORMATS = ("full", "sharded")
LEARNING = "the learning"


def named(shape):
    return "-".join(map(str, shape))


class Learning(Resumable):
    """A model for bytes."""

    def __init__(self):
        super().__init__()
        self.overrides["vocab_size"] = VOCAB_SIZE


class Watch(Callback):
    """Writes down every step, and writes checkpoints of both formats after one of them."""

    def __init__(self, folder=None):
        self.folder, self.steps = folder, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        rows = tuple(sorted(bytes(row.to(torch.uint8).tolist()) for row in batch["input_ids"]))
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.steps.append((trainer.current_epoch, batch_idx, trainer.global_step, rate, rows, float(outputs["loss"])))
        if self.folder is not None and trainer.global_step == SAVED_AT:
            for form in FORMATS:
                trainer.strategy.state_dict_type = form
                trainer.save_checkpoint(self.folder / form)
            trainer.strategy.state_dict_type = "full"


@functools.cache
def documents(root):
    """Six full rows, every token of which is supervised; read once in each process."""
    return LongDocuments(str(root / "text.txt"), str(root / "tokenizer"), sequence_length=LENGTH, seed=3)


def run(root, folder, shape, ckpt_path=None):
    """Train up to the last step; what every step was."""
    stages, virtual, replicas = shape
    schedule = "seq1f1b" if virtual == 1 else "interleaved_seq1f1b"
    strategy = Seq1F1BStrategy(stages, num_chunks=2, schedule=schedule, virtual_stages=virtual)
    torch.manual_seed(random.randrange(1000))  # nothing that follows may depend on it
    watch = Watch(folder if ckpt_path is None else None)
    trainer = L.Trainer(
        **QUIET, devices=stages * replicas, strategy=strategy, max_steps=LAST_STEP, callbacks=[Counter(), watch]
    )
    data = documents(root)
    data.batch_size = GLOBAL_BATCH // replicas
    trainer.fit(Learning(), data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(folder / END)
    return watch.steps


def begin(rank, root, shapes):
    return {shape: run(root, root / named(shape), shape) for shape in shapes}


def go_on(rank, root, shapes):
    return {
        (source, shape, form): run(
            root, root / f"{named(source)}-to-{named(shape)}-{form}", shape, root / named(source) / form
        )
        for source, shape, form in itertools.product(ALL, shapes, FORMATS)
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs; the folder of their files, and their steps by place and rank."""
    root = tmp_path_factory.mktemp("matrix")
    save_byte_tokenizer(root / "tokenizer")
    text = random.Random(0).choices("abcdefghijklmnop", k=ROWS * (LENGTH - 1))
    (root / "text.txt").write_text("".join(text))
    begun, gone_on = (
        {
            key: [of_rank[key] for of_rank in by_rank]
            for processes, shapes in SHAPES.items()
            for by_rank in [run_processes(work, processes, root, shapes)]
            for key in by_rank[0]
        }
        for work in (begin, go_on)
    )
    return root, begun, gone_on


def of_one_device(by_rank, shape):
    """The steps of all replicas together, as one device would have made them; stages must agree exactly."""
    stages, _, replicas = shape
    for replica in range(replicas):
        first, *others = by_rank[replica * stages : (replica + 1) * stages]
        assert all(other == first for other in others)
    steps = []
    for parts in zip(*by_rank[::stages], strict=True):
        assert len({part[:4] for part in parts}) == 1
        rows = tuple(sorted(row for part in parts for row in part[4]))
        steps.append((*parts[0][:4], rows, sum(part[5] for part in parts) / replicas))
    return steps


def assert_same_steps(got, expected):
    assert [step[:3] for step in got] == [step[:3] for step in expected]
    assert [step[4] for step in got] == [step[4] for step in expected]
    for one, other in zip(got, expected, strict=True):
        assert abs(one[3] - other[3]) <= 1e-12
        assert abs(one[5] - other[5]) <= 1e-6


def assert_same_end(root, folder):
    """Weights, moments, schedulers, loops, callbacks and counters at the end; batches and files differ by name only."""
    truth = root / named(ALL[0]) / END
    assert_same_content(root / folder / END, truth, without=["datamodule_hyper_parameters"])


@pytest.mark.behaviour(29)
@pytest.mark.behaviour(30)
def test_the_truth_is_shuffled_and_ends_within_an_epoch(runs):
    _, begun, _ = runs
    steps = of_one_device(begun[ALL[0]], ALL[0])
    epochs = [[step[4] for step in steps if step[0] == epoch] for epoch in range(3)]
    assert [len(epoch) for epoch in epochs] == [EPOCH_STEPS, EPOCH_STEPS, LAST_STEP - 2 * EPOCH_STEPS]
    assert len({tuple(epoch) for epoch in epochs[:2]}) == 2
    assert len({row for batch in epochs[0] for row in batch}) == ROWS
    assert sorted(itertools.chain(*epochs[0])) == sorted(itertools.chain(*epochs[1]))


@pytest.mark.parametrize("shape", ALL, ids=named)
def test_uninterrupted_runs_equal_one_device(runs, shape):
    root, begun, _ = runs
    assert_same_steps(of_one_device(begun[shape], shape), of_one_device(begun[ALL[0]], ALL[0]))
    assert_same_end(root, named(shape))


@pytest.mark.behaviour(29)
@pytest.mark.behaviour(30)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", ALL, ids=lambda shape: f"to-{named(shape)}")
@pytest.mark.parametrize("source", ALL, ids=lambda shape: f"from-{named(shape)}")
def test_resumed_runs_equal_an_uninterrupted_one(runs, source, shape, form):
    root, begun, gone_on = runs
    expected = of_one_device(begun[ALL[0]], ALL[0])[SAVED_AT:]
    assert len(expected) == LAST_STEP - SAVED_AT
    assert_same_steps(of_one_device(gone_on[source, shape, form], shape), expected)
    assert_same_end(root, f"{named(source)}-to-{named(shape)}-{form}")
