"""Setting up: a summary of the whole model, one error for a wrong number of processes, nothing left by a second fit."""

import functools
import gc
import os
import threading
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelSummary
from support.fitting import ONE_DEVICE, TWO_STAGES, difference, everywhere, fit, fitted_weights, rows, stages, weights
from support.training import QUIET, FineTune, Recorder

from lightning_seq1f1b import Seq1F1BStrategy

ONE_STAGE = stages(1)


# ---- the summary ---------------------------------------------------------------------------------------------------


class KeptSummary(ModelSummary):
    """Keeps what it would print."""

    def summarize(self, *args, **kwargs):
        self.shown = [*args, *sorted(kwargs.items())]


def summary(depth, where):
    callback = KeptSummary(max_depth=depth)
    fit(where, FineTune(tie_word_embeddings=True), rows(), callbacks=[callback], max_steps=1)
    return getattr(callback, "shown", None)


SUMMARIES = tuple(functools.partial(summary, depth) for depth in (1, -1))


@pytest.mark.behaviour(38)
@pytest.mark.parametrize("case", SUMMARIES, ids=["short", "deep"])
def test_summary_counts_the_whole_model(case):
    (expected,) = everywhere(SUMMARIES, ONE_DEVICE)[case]
    first, other = everywhere(SUMMARIES, TWO_STAGES)[case]
    assert first == expected
    assert other is None
    assert dict(expected[0])["Params"]


# ---- the number of processes ---------------------------------------------------------------------------------------


def make_trainer(devices, **strategy):
    return L.Trainer(**QUIET, devices=devices, strategy=Seq1F1BStrategy(**strategy))


@pytest.mark.behaviour(39)
@pytest.mark.parametrize("num_stages", [2, 4])
def test_processes_that_make_no_whole_pipelines_are_one_error_before_any_starts(num_stages):
    with mock.patch("subprocess.Popen") as start, pytest.raises(ValueError, match="3 processes do not divide into"):
        make_trainer(3, num_stages=num_stages).fit(FineTune(), rows())
    start.assert_not_called()
    assert not dist.is_initialized()


@pytest.mark.behaviour(39)
def test_devices_that_differ_from_torchruns_are_one_error_before_any_connection():
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    with (
        mock.patch.dict(os.environ, {**torchrun, "TORCHELASTIC_RUN_ID": "1"}),
        pytest.raises(ValueError, match=r"2 \* 1\) does not match the world size \(4\)"),
    ):
        make_trainer(2).fit(FineTune(), rows())
    assert not dist.is_initialized()


# ---- one stage -----------------------------------------------------------------------------------------------------


def fit_in_one_piece(dropout, where):
    """Rows in one microbatch and one chunk: nothing is left but the strategy itself."""
    if where == ONE_STAGE:
        where = stages(1, num_chunks=1, num_microbatches=1)
    module = FineTune("gpt2", torch.float64, resid_pdrop=dropout, embd_pdrop=dropout)
    recorder = Recorder()
    trainer = fit(where, module, rows(), callbacks=[recorder], gradient_clip_val=0.5)
    return recorder.losses, weights(trainer)


PIECES = tuple(functools.partial(fit_in_one_piece, dropout) for dropout in (0.0, 0.1))
IN_CHUNKS = (fitted_weights,)


@pytest.mark.behaviour(43)
@pytest.mark.parametrize("case", PIECES, ids=["plain", "dropout"])
def test_one_stage_and_one_chunk_equal_one_device(case):
    ((expected_losses, expected),) = everywhere(PIECES, ONE_DEVICE)[case]
    ((losses, got),) = everywhere(PIECES, ONE_STAGE)[case]
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-7)
    assert difference(got, expected) < 1e-7


@pytest.mark.behaviour(43)
def test_one_stage_in_chunks_equals_one_device():
    (expected,) = everywhere(IN_CHUNKS, ONE_DEVICE)[fitted_weights]
    (got,) = everywhere(IN_CHUNKS, ONE_STAGE)[fitted_weights]
    assert difference(got, expected) < 5e-6


# ---- a second time -------------------------------------------------------------------------------------------------


def belongings(trainer):
    """What a fit could leave more of: groups, threads, open files, hooks, modules, forwards wrapped around forwards."""
    gc.collect()
    module = trainer.lightning_module
    hooks = [
        name
        for submodule in module.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        for _ in getattr(submodule, name)
    ]
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "hooks": sorted(hooks),
        "modules": [name for name, _ in module.named_modules()],
        "parameters": [name for name, _ in module.named_parameters()],
        "own forward": module.model.forward.__wrapped__.__func__ is type(module.model).forward,
    }


def fit_three_times(where):
    """Twice with one Trainer, then with another one and a new module."""
    module = FineTune()
    trainer = fit(where, module, rows(), max_epochs=1)
    after_one = belongings(trainer)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, rows())
    trained = weights(trainer)
    after_two = belongings(trainer)
    del trainer, module
    return trained, after_one, after_two, belongings(fit(where, FineTune(), rows(), max_epochs=1))


def weights_after_two_fits(where):
    module = FineTune()
    trainer = fit(where, module, rows(), max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, rows())
    return weights(trainer)


@pytest.mark.behaviour(44)
def test_fitting_again_equals_one_device_and_leaves_nothing_more():
    by_rank = everywhere((fit_three_times,), TWO_STAGES)[fit_three_times]
    assert difference(by_rank[0][0], weights_after_two_fits(ONE_DEVICE)) < 5e-6
    for _, once, twice, another in by_rank:
        assert once["own forward"]
        # Groups open some files that they close a little later, so the first count may be higher.
        files = [each.pop("files") for each in (once, twice, another)]
        assert max(files[1:]) <= files[0]
        assert once == twice == another
        assert not any("seq1f1b" in name for name in once["threads"])
