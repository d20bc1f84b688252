"""Loaders of different lengths end a run on all processes at once, with the same words, and never by the timeout."""

import time

import lightning as L
import pytest
from support.numbered_rows import NumberedRows
from support.processes import run_processes
from support.training import QUIET, FineTune
from torch.utils.data import DataLoader, IterableDataset

from lightning_seq1f1b import Seq1F1BStrategy
from lightning_seq1f1b.runtime.agreement import UnevenLoadersError

LONG, SHORT = 3, 2
SOON_S = 20
STAGES, REPLICAS = (("num_stages", 2),), (("num_stages", 1),)


class Stream(IterableDataset):
    """So many rows, which nobody can know beforehand; with stages the same rows in all processes."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        rows = NumberedRows(LONG)
        return (rows[index] for index in range(self.count))


def stream(count):
    return DataLoader(Stream(count), batch_size=1)


def sized(count):
    return DataLoader(NumberedRows(count), batch_size=1)


def trainer_of(strategy, **options):
    options = {**QUIET, "max_epochs": 2, "num_sanity_val_steps": 0, "use_distributed_sampler": False, **options}
    return L.Trainer(devices=2, strategy=Seq1F1BStrategy(**dict(strategy), num_chunks=1), **options)


def train(strategy, counts, make, rank):
    trainer_of(strategy).fit(FineTune(num_hidden_layers=2), make(counts[rank]))


def validate_within_fit(strategy, counts, make, rank):
    trainer_of(strategy).fit(FineTune(num_hidden_layers=2), make(LONG), make(counts[rank]))


def evaluate(strategy, counts, make, rank):
    trainer_of(strategy).test(FineTune(num_hidden_layers=2), make(counts[rank]), verbose=False)


def predict(strategy, counts, make, rank):
    trainer_of(strategy).predict(FineTune(num_hidden_layers=2), make(counts[rank]))


def limited(strategy, counts, make, rank):
    """What all processes have is enough: nothing is raised."""
    trainer = trainer_of(strategy, limit_train_batches=SHORT)
    trainer.fit(FineTune(num_hidden_layers=2), make(counts[rank]))
    return trainer.global_step


FIRST_SHORT, SECOND_SHORT, FIRST_EMPTY = (SHORT, LONG), (LONG, SHORT), (0, LONG)
CASES = {
    "train, first short": (train, FIRST_SHORT, stream),
    "train, second short": (train, SECOND_SHORT, stream),
    "train, first empty": (train, FIRST_EMPTY, stream),
    "train, sized": (train, FIRST_SHORT, sized),
    "validate": (validate_within_fit, FIRST_SHORT, stream),
    "validate, first empty": (validate_within_fit, FIRST_EMPTY, stream),
    "test": (evaluate, SECOND_SHORT, stream),
    "predict": (predict, FIRST_SHORT, stream),
    "predict, sized": (predict, SECOND_SHORT, sized),
}
LOADERS = {"train": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader"}


def run_all(rank, strategy):
    """What every case raised, and how long it took."""
    steps = limited(strategy, FIRST_SHORT, stream, rank)
    ends = {}
    for name, (run, counts, make) in CASES.items():
        began = time.monotonic()
        with pytest.raises(UnevenLoadersError) as caught:
            run(strategy, counts, make, rank)
        ends[name] = (str(caught.value), time.monotonic() - began)
    return steps, ends


@pytest.fixture(scope="module", params=[STAGES, REPLICAS], ids=["stages", "replicas"])
def by_rank(request):
    return run_processes(run_all, 2, request.param)


@pytest.mark.behaviour(17)
@pytest.mark.parametrize("name", CASES)
def test_all_processes_end_soon_with_the_same_words(by_rank, name):
    _, counts, make = CASES[name]
    first, second = (ends[name] for _, ends in by_rank)
    assert first[0].split("\n")[0] == second[0].split("\n")[0]
    loader = LOADERS.get(name.split(",")[0], "predict_dataloader")
    if make is sized:
        lengths = [f"has {count} batches" for count in counts]
    else:
        least = min(counts)
        lengths = [f"{'ended' if count == least else 'goes on'} after {least} batches" for count in counts]
    for message, seconds in (first, second):
        assert f"the {loader} has different lengths on different processes" in message
        assert f"rank 0 {lengths[0]}; rank 1 {lengths[1]}" in message
        assert seconds < SOON_S


@pytest.mark.behaviour(17)
def test_a_limit_that_all_processes_reach_is_enough(by_rank):
    for steps, _ in by_rank:
        assert steps == 2 * SHORT
