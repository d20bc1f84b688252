"""All stages see the rows of one device, in its order, whatever shuffles, augments or loads them."""

import os
from unittest import mock

import lightning as L
import pytest
import torch.distributed as dist
from support.fitting import ONE_DEVICE, TWO_STAGES, difference, everywhere, fit, stages, weights
from support.numbered_rows import AugmentedRows, NumberedRows, SeenRows
from support.processes import run_processes
from support.training import FineTune
from torch.utils.data import DataLoader, IterableDataset

from lightning_seq1f1b.runtime.agreement import BatchMismatchError

COUNT = 10


class Module(FineTune):
    """Has loaders of its own; writes down the sum of each batch's tokens, which augmentation changes."""

    def __init__(self, dataset=None, family="llama", loader=None, **overrides):
        super().__init__(family, **overrides)
        self.dataset = dataset or NumberedRows(COUNT)
        self.loader = {"batch_size": 3, "shuffle": True} if loader is None else loader
        self.sums, self.asked = [], 0

    def train_dataloader(self):
        self.asked += 1
        return DataLoader(self.dataset, **self.loader)

    def val_dataloader(self):
        return DataLoader(NumberedRows(7), batch_size=2)

    def training_step(self, batch, batch_idx):
        self.sums.append(int(batch["input_ids"].sum()))
        return super().training_step(batch, batch_idx)


def run(where, module=None, **options):
    recorder, module = SeenRows(), module or Module()
    fit(where, module, None, callbacks=[recorder], **options)
    return {"train": recorder.train, "val": recorder.val, "sums": module.sums, "asked": module.asked}


def shuffled(where):
    return run(where, num_sanity_val_steps=2)


def shuffled_by_a_sampler_of_the_user(where):
    return run(where, use_distributed_sampler=False)


def augmented(where):
    with mock.patch.dict(os.environ):
        L.seed_everything(3)
        return run(where, Module(AugmentedRows(COUNT)))


def augmented_by_workers(where):
    with mock.patch.dict(os.environ):
        L.seed_everything(3, workers=True)
        loader = {"batch_size": 3, "shuffle": True, "num_workers": 2}
        return run(where, Module(AugmentedRows(COUNT), loader=loader))


def limited(where):
    return run(where, limit_train_batches=2, limit_val_batches=1)


def overfitted(where):
    return run(where, overfit_batches=2)


def reloaded(where):
    return run(where, reload_dataloaders_every_n_epochs=1)


class PlainBatchSampler:
    """Lists batches of its own, and is no BatchSampler."""

    def __iter__(self):
        return iter([[4, 1], [7, 2, 3]])

    def __len__(self):
        return 2


def listed(where):
    return run(where, Module(loader={"batch_sampler": PlainBatchSampler()}))


def with_dropout(where):
    """Three layers, so that the stages draw different amounts of random numbers."""
    module = Module(family="gpt2", num_hidden_layers=3, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    return run(where, module)


AS_ONE_DEVICE = (
    shuffled,
    shuffled_by_a_sampler_of_the_user,
    augmented,
    augmented_by_workers,
    limited,
    overfitted,
    reloaded,
    listed,
)
CASES = (*AS_ONE_DEVICE, with_dropout)


@pytest.mark.behaviour(13)
@pytest.mark.behaviour(16)
@pytest.mark.parametrize("case", AS_ONE_DEVICE)
def test_all_stages_see_the_rows_of_one_device(case):
    expected = everywhere(CASES, ONE_DEVICE)[case][0]
    assert len(expected["train"]) == 2
    for stage in everywhere(CASES, TWO_STAGES)[case]:
        assert stage == expected


@pytest.mark.behaviour(13)
def test_the_truth_is_shuffled_and_augmented():
    truth = everywhere(CASES, ONE_DEVICE)
    assert truth[shuffled][0]["train"][0] != truth[shuffled][0]["train"][1]
    assert truth[augmented][0]["sums"] != truth[augmented_by_workers][0]["sums"] != truth[shuffled][0]["sums"]


@pytest.mark.behaviour(13)
def test_dropout_does_not_drive_the_stages_apart():
    first, second = everywhere(CASES, TWO_STAGES)[with_dropout]
    assert first == second
    assert first["train"][0] != first["train"][1]
    assert first["train"][0] == everywhere(CASES, ONE_DEVICE)[shuffled][0]["train"][0]


class Sharded(IterableDataset):
    """Gives each process rows of its own; one process has those of the first of two."""

    def __iter__(self):
        place = dist.get_rank() if dist.is_initialized() else 0
        source = NumberedRows(COUNT)
        return (source[index] for index in range(place, COUNT, 2))


def sharded(where):
    recorder, module = SeenRows(), FineTune()
    trainer = fit(where, module, DataLoader(Sharded(), batch_size=2), callbacks=[recorder])
    return recorder.train, weights(trainer)


@pytest.mark.behaviour(14)
def test_the_first_stage_hands_its_batch_to_the_others():
    expected_rows, expected_weights = everywhere((sharded,), ONE_DEVICE)[sharded][0]
    by_rank = everywhere((sharded,), stages(broadcast_batch=True))[sharded]
    for stage_rows, _ in by_rank:
        assert stage_rows == expected_rows
    assert difference(by_rank[0][1], expected_weights) <= 5e-6


def mismatched(rank):
    with pytest.raises(BatchMismatchError) as caught:
        sharded(TWO_STAGES)
    return str(caught.value)


@pytest.mark.behaviour(14)
def test_different_batches_end_with_the_same_words_on_all_stages():
    first, second = run_processes(mismatched, 2)
    for message in (first, second):
        assert "'input_ids' is rank 0: [2, 13] int64" in message
        assert "Seq1F1BStrategy(broadcast_batch=True)" in message
