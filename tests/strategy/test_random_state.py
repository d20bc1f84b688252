"""A resumed run draws the random numbers that it would have drawn: orders of rows, augmentation, dropout."""

import functools
import itertools
import random

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.fitting import everywhere, stages
from support.numbered_rows import AugmentedRows, NumberedRows, numbers
from support.processes import run_processes
from support.training import QUIET, FineTune
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from lightning_seq1f1b import Seq1F1BStrategy
from lightning_seq1f1b.strategy.random_state import drawing_from, random_state, set_random_state

ROWS, BATCH, EPOCHS = 5, 2, 3
EPOCH_BATCHES = 3


class Shuffling(FineTune):
    """Has a training loader and perhaps one for validation; no dropout."""

    def __init__(self, make_loader, validates=False, **overrides):
        super().__init__(**{"num_hidden_layers": 1, **overrides})
        self.make_loader, self.validates = make_loader, validates

    def train_dataloader(self):
        return self.make_loader()

    def val_dataloader(self):
        return DataLoader(NumberedRows(3), batch_size=2) if self.validates else []


class Witness(Callback):
    """Writes down rows and sums of tokens of each batch; writes a checkpoint at a moment of every epoch."""

    def __init__(self, folder=None, moment=None):
        self.folder, self.moment, self.seen = folder, moment, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((trainer.current_epoch, numbers(batch), int(batch["input_ids"].sum()), float(outputs["loss"])))
        if self.moment == batch_idx:
            self._save(trainer)

    def on_validation_end(self, trainer, pl_module):
        if self.moment == "validation":
            self._save(trainer)

    def on_train_epoch_end(self, trainer, pl_module):
        if self.moment == "epoch end":
            self._save(trainer)

    def _save(self, trainer):
        if self.folder is not None and trainer.current_epoch < EPOCHS - 1:
            trainer.save_checkpoint(self.folder / f"{len(self.seen)}.ckpt")


def run(where, module, witness, seed=0, ckpt_path=None):
    torch.manual_seed(seed)
    strategy = Seq1F1BStrategy(**dict(where.strategy))
    trainer = L.Trainer(
        **QUIET, devices=where.devices, strategy=strategy, max_epochs=EPOCHS, num_sanity_val_steps=0,
        callbacks=[witness],
    )  # fmt: skip
    trainer.fit(module, ckpt_path=ckpt_path)
    return witness.seen


def gone_on(folder, make_loader, moment, where, **options):
    """What an uninterrupted run saw, and what runs saw that went on from each of its checkpoints."""
    folder = folder / moment_name(moment)
    whole = run(where, Shuffling(make_loader, moment == "validation", **options), Witness(folder, moment))
    parts = {}
    for path in sorted(folder.glob("*.ckpt")):
        module = Shuffling(make_loader, moment == "validation", **options)
        parts[int(path.stem)] = run(where, module, Witness(), seed=99, ckpt_path=path)
    return whole, parts


def moment_name(moment):
    return str(moment).replace(" ", "-")


def shuffled():
    return DataLoader(NumberedRows(ROWS), batch_size=BATCH, shuffle=True)


def augmented():
    return DataLoader(AugmentedRows(ROWS), batch_size=BATCH, shuffle=True)


def shuffled_by_workers():
    return DataLoader(NumberedRows(ROWS), batch_size=BATCH, shuffle=True, num_workers=1)


def with_generator():
    generator = torch.Generator().manual_seed(5)
    return DataLoader(NumberedRows(ROWS), batch_size=BATCH, shuffle=True, generator=generator)


class OwnBatches(BatchSampler):
    """A class of the user's, whose batches nobody can count in rows."""


def own_batches():
    rows = NumberedRows(ROWS)
    return DataLoader(rows, batch_sampler=OwnBatches(RandomSampler(rows), BATCH, drop_last=False))


class Stream(IterableDataset):
    """Rows in an order drawn anew in each epoch; nobody knows how many there are."""

    def __iter__(self):
        rows = AugmentedRows(ROWS)
        return (rows[index] for index in torch.randperm(ROWS).tolist())


def streamed():
    return DataLoader(Stream(), batch_size=BATCH)


MOMENTS = (0, EPOCH_BATCHES - 1, "validation", "epoch end")
CASES = [
    *itertools.product((shuffled, shuffled_by_workers), MOMENTS),
    *itertools.product((augmented, with_generator, own_batches, streamed), (MOMENTS[0], MOMENTS[-1])),
]


@pytest.fixture(scope="module")
def on_one_stage(tmp_path_factory):
    """All loaders and moments, in one process."""
    root = tmp_path_factory.mktemp("random")
    cases = {
        (loader, moment): functools.partial(gone_on, root / loader.__name__, loader, moment) for loader, moment in CASES
    }
    results = everywhere(tuple(cases.values()), stages(1, num_chunks=2))
    return {key: results[case][0] for key, case in cases.items()}


@pytest.mark.behaviour(30)
@pytest.mark.parametrize(("loader", "moment"), CASES, ids=[f"{case.__name__}-{moment_name(m)}" for case, m in CASES])
def test_runs_go_on_with_the_rows_that_were_to_come(on_one_stage, loader, moment):
    whole, parts = on_one_stage[loader, moment]
    assert len(whole) == EPOCHS * EPOCH_BATCHES
    assert len({tuple(itertools.chain(*(step[1] for step in whole if step[0] == epoch))) for epoch in range(3)}) == 3
    assert len(parts) == EPOCHS - 1
    for seen, part in parts.items():
        assert part == whole[seen:]


# ---- two processes -------------------------------------------------------------------------------------------------

AS_STAGES, AS_REPLICAS = stages(2, num_chunks=1), stages(2, num_chunks=1, num_stages=1)
EVEN_ROWS = 6
DROPOUT = {"family": "gpt2", "num_hidden_layers": 2, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}


def one_row():
    return DataLoader(NumberedRows(EVEN_ROWS), batch_size=1, shuffle=True)


def two_rows():
    return DataLoader(NumberedRows(EVEN_ROWS), batch_size=2, shuffle=True)


PLACES = {"stages": (AS_STAGES, two_rows), "replicas": (AS_REPLICAS, one_row)}
"""A batch over all replicas has two rows."""


def run_on_two(rank, root):
    """At both places: a run with dropout, and what goes on from its first epoch's second batch, here and there."""
    whole, parts = {}, {}
    for name, (where, loader) in PLACES.items():
        whole[name] = run(where, Shuffling(loader, **DROPOUT), Witness(root / name, 1))
    for name, (where, loader) in PLACES.items():
        for source in PLACES:
            path = root / source / "2.ckpt"
            parts[source, name] = run(where, Shuffling(loader, **DROPOUT), Witness(), seed=99, ckpt_path=path)
    return whole, parts


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    return run_processes(run_on_two, 2, tmp_path_factory.mktemp("two"))


def batches(by_rank, place, epoch):
    """The rows of every batch over all replicas."""
    steps = [[rows for number, rows, *_ in of_rank if number == epoch] for of_rank in by_rank]
    if place == "stages":
        assert steps[0] == steps[1]
        return [sorted(rows) for rows in steps[0]]
    return [sorted(itertools.chain(*rows)) for rows in zip(*steps, strict=True)]


@pytest.mark.behaviour(30)
@pytest.mark.parametrize("place", PLACES)
def test_dropout_goes_on_as_it_would_have(on_two, place):
    for whole, parts in on_two:
        assert len(whole[place]) == EPOCHS * EVEN_ROWS // 2
        assert parts[place, place] == whole[place][2:]


@pytest.mark.behaviour(15)
@pytest.mark.behaviour(30)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("source", PLACES)
def test_an_epoch_keeps_its_order_with_other_replicas(on_two, source, place):
    whole = [whole[source] for whole, _ in on_two]
    part = [parts[source, place] for _, parts in on_two]
    assert batches(part, place, 0) == batches(whole, source, 0)[2:]
    for epoch in (1, 2):
        assert sorted(itertools.chain(*batches(part, place, epoch))) == list(range(EVEN_ROWS))


def test_one_order_is_that_of_one_device_and_the_other_of_data_parallel(on_two):
    by_place = [batches([whole[place] for whole, _ in on_two], place, 0) for place in PLACES]
    assert by_place[0] != by_place[1]


# ---- states --------------------------------------------------------------------------------------------------------


def drawn():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_state_comes_back_through_a_file(tmp_path):
    random.gauss(0, 1)  # keeps a second number for later
    np.random.normal()
    torch.save(random_state(), tmp_path / "state")
    expected = random.gauss(0, 1), np.random.normal(), *drawn()
    set_random_state(torch.load(tmp_path / "state", weights_only=True))
    assert (random.gauss(0, 1), np.random.normal(), *drawn()) == expected


def test_drawing_from_a_state_moves_no_other():
    state = random_state()
    first = drawn()
    before = random_state()
    with drawing_from(state):
        assert drawn() == first
    after = drawn()
    set_random_state(before)
    assert drawn() == after
