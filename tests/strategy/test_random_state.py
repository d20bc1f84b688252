"""A resumed run draws the random numbers that it would have drawn: orders of rows, augmentation, dropout."""

import functools
import itertools

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.fitting import everywhere, stages
from support.numbered_rows import AugmentedRows, NumberedRows, numbers
from support.training import QUIET, FineTune
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from lightning_seq1f1b import Seq1F1BStrategy
from lightning_seq1f1b.strategy.random_state import drawing_from, random_state, set_random_state

ROWS, BATCH, EPOCHS = 7, 2, 3
EPOCH_BATCHES = 4


class Shuffling(FineTune):
    """Has a training loader and perhaps one for validation; no dropout."""

    def __init__(self, make_loader, validates=False, **overrides):
        super().__init__(**overrides)
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
        place = (trainer.current_epoch, batch_idx)
        self.seen.append((*place, numbers(batch), int(batch["input_ids"].sum()), float(outputs["loss"])))
        if self.moment == batch_idx:
            self._save(trainer)

    def on_validation_end(self, trainer, pl_module):
        if self.moment == "validation":
            self._save(trainer)

    def on_train_epoch_end(self, trainer, pl_module):
        if self.moment == "epoch end":
            self._save(trainer)

    def _save(self, trainer):
        if self.folder is not None:
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


LOADERS = (shuffled, augmented, shuffled_by_workers, with_generator, own_batches, streamed)
MOMENTS = (1, EPOCH_BATCHES - 1, "validation", "epoch end")
ONE_STAGE = stages(1)


@pytest.fixture(scope="module")
def on_one_stage(tmp_path_factory):
    """All loaders and moments, in one process."""
    root = tmp_path_factory.mktemp("random")
    cases = {
        (loader, moment): functools.partial(gone_on, root / loader.__name__, loader, moment)
        for loader, moment in itertools.product(LOADERS, MOMENTS)
    }
    results = everywhere(tuple(cases.values()), stages(1, num_chunks=2))
    return {key: results[case][0] for key, case in cases.items()}


@pytest.mark.behaviour(30)
@pytest.mark.parametrize("moment", MOMENTS, ids=moment_name)
@pytest.mark.parametrize("loader", LOADERS)
def test_runs_go_on_with_the_rows_that_were_to_come(on_one_stage, loader, moment):
    whole, parts = on_one_stage[loader, moment]
    assert len(whole) == EPOCHS * EPOCH_BATCHES
    assert len({tuple(itertools.chain(*(step[2] for step in whole if step[0] == epoch))) for epoch in range(3)}) == 3
    assert len(parts) == EPOCHS
    for seen, part in parts.items():
        assert part == whole[seen:]
