"""The promise: an unchanged module, trained over stages, has the losses, metrics and weights of one device."""

import functools
import itertools

import lightning as L
import pytest
import torch
from support.processes import ProcessFailedError, run_processes
from support.training import QUIET, FineTune, Scenario, assert_same, loaders, train, train_all

from lightning_seq1f1b import Seq1F1BStrategy

DTYPES = {"float64": (torch.float64, "64-true", 1e-6), "float32": (torch.float32, "32-true", 5e-6)}
PIECES = [
    (1, "even", 2),
    (3, "even", "auto"),
    (5, "even", 1),
    (1, "balanced", "auto"),
    (3, "balanced", 2),
    (5, "balanced", 5),
]
"""Chunks, their lengths, and microbatches of batches of three rows and of two."""
KINDS = list(itertools.product(DTYPES, (False, True)))
"""Types, and whether rows are padded."""


def scenario(dtype, *, padded, chunks=1, **strategy):
    torch_dtype, precision, _ = DTYPES[dtype]
    return Scenario(
        module={"dtype": torch_dtype},
        trainer={"precision": precision, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
        strategy={"num_chunks": chunks, **strategy},
        padded=padded,
    )


@functools.cache
def one_device(dtype, padded):
    return train(scenario(dtype, padded=padded), None)


def pieces(dtype, padded):
    return [
        scenario(dtype, padded=padded, chunks=chunks, partition=partition, num_microbatches=microbatches)
        for chunks, partition, microbatches in PIECES
    ]


@functools.cache
def on_stages(num_stages):
    """What each rank shows of all `pieces`, which share one start of the processes. An error is kept, too."""
    every = [each for kind in KINDS for each in pieces(*kind)]
    try:
        return run_processes(train_all, num_stages, every, num_stages)
    except ProcessFailedError as error:
        return error


@pytest.mark.behaviour(1)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "padded"), KINDS)
def test_equals_one_device(num_stages, dtype, padded):
    expected, by_rank = one_device(dtype, padded), on_stages(num_stages)
    assert expected.losses[0] > expected.losses[-1] > 0  # it does train
    if isinstance(by_rank, ProcessFailedError):
        raise by_rank
    first = KINDS.index((dtype, padded)) * len(PIECES)
    for place in range(first, first + len(PIECES)):
        assert_same([outcomes[place] for outcomes in by_rank], expected, DTYPES[dtype][2])


def refit_with_a_new_model(rank):
    """A `configure_model` that is not idempotent gives the module a new, whole model for every fit, validate, test."""
    return losses_of_two_validations(2)


def losses_of_two_validations(devices):
    where = {"devices": 1, "strategy": "auto"} if devices is None else {"devices": devices, "strategy": "seq1f1b"}
    trainer, module = L.Trainer(**QUIET, **where), FineTune()
    _, validation = loaders(Scenario())
    losses = []
    for seed in (0, 1):
        module.overrides = {"seed": seed}
        module.__dict__["_modules"].pop("model", None)
        losses.append(trainer.validate(module, validation, verbose=False)[0]["val_loss"])
    return losses


def test_a_model_made_anew_is_cut_anew():
    expected = losses_of_two_validations(None)
    assert abs(expected[0] - expected[1]) > 1e-3
    for losses in run_processes(refit_with_a_new_model, 2):
        torch.testing.assert_close(losses, expected, rtol=0, atol=5e-6)


def validated_by_a_second_trainer(devices):
    def trainer():
        where = {"devices": 1, "strategy": "auto"} if devices is None else {"devices": devices}
        return L.Trainer(**QUIET, max_epochs=1, **({"strategy": Seq1F1BStrategy(num_chunks=2)} | where))

    module, (training, validation) = FineTune(), loaders(Scenario())
    trainer().fit(module, training)
    loss = trainer().validate(module, validation, verbose=False)[0]["val_loss"]
    if devices is not None:
        with pytest.raises(ValueError, match=r"cut into 2 stage\(s\) by an earlier Trainer"):
            L.Trainer(**QUIET, devices=devices, strategy=Seq1F1BStrategy(num_stages=1)).validate(module, validation)
    return loss


def fit_then_validate(rank):
    return validated_by_a_second_trainer(2)


def test_a_second_trainer_takes_the_module_as_it_is():
    expected = validated_by_a_second_trainer(None)
    for loss in run_processes(fit_then_validate, 2):
        assert abs(loss - expected) < 5e-6
