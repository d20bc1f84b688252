"""With several stages on a rank, everything around the step is as with one: checkpoints, norms, summaries, replicas."""

from __future__ import annotations

import functools
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from support.fitting import (
    DATA_PARALLEL,
    ONE_DEVICE,
    TWO_STAGES,
    difference,
    everywhere,
    fit,
    fitted_weights,
    rows,
    stages,
    weights,
)
from support.resuming import END, Resumable, assert_same_content, load
from support.resuming import fit as resumable_fit
from support.training import QUIET, FineTune
from torch import nn

from lightning_seq1f1b import Seq1F1BStrategy
from lightning_seq1f1b.runtime.topology import Topology
from lightning_seq1f1b.strategy.cut_module import CutModule
from lightning_seq1f1b.strategy.report import describe

TOLERANCE = 5e-6
FLAGSHIP = {"schedule": "interleaved_seq1f1b_zb", "virtual_stages": 2}
TWO_EACH = stages(**FLAGSHIP)
TWO_EACH_ON_ONE_RANK = stages(1, **FLAGSHIP)
REPLICAS = stages(4, num_stages=2, **FLAGSHIP)

# ---- the maths around the step -------------------------------------------------------------------------------------


class SGD(FineTune):
    """Plain gradient descent, whose steps show the gradients' size; a learned factor beside the language model."""

    def __init__(self, trained=(), **options):
        super().__init__(**options)
        self.factor = nn.Parameter(torch.tensor([1.5]))
        self.trained = trained

    def configure_model(self):
        super().configure_model()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not self.trained or any(word in name for word in self.trained))

    def training_step(self, batch, batch_idx):
        return (self.model(**batch).loss * self.factor).squeeze()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def clipped(where):
    return fitted_weights(where, SGD(), gradient_clip_val=0.2)


def clipped_when_tied(where):
    return fitted_weights(where, SGD(tie_word_embeddings=True), gradient_clip_val=0.2, accumulate_grad_batches=2)


def first_stages_frozen(where):
    return fitted_weights(where, SGD(("layers.3", "model.norm", "lm_head")), gradient_clip_val=0.2)


def every_second_stage_frozen(where):
    return fitted_weights(where, SGD(("layers.0", "layers.2")), gradient_clip_val=0.2)


def validated(where):
    """Validation between steps, and again by a second call; what the program logs."""
    trainer = fit(where, SGD(), rows(), rows(5, seed=2), val_check_interval=1)
    logged = trainer.validate(trainer.lightning_module, rows(5, seed=2), verbose=False)
    return weights(trainer), [float(value) for metrics in logged for value in metrics.values()]


MATHS = (clipped, clipped_when_tied, first_stages_frozen, every_second_stage_frozen)


@pytest.mark.parametrize("where", [TWO_EACH, TWO_EACH_ON_ONE_RANK], ids=["two ranks", "one rank"])
@pytest.mark.parametrize("case", MATHS)
def test_clipping_accumulation_and_frozen_stages_equal_one_device(case, where):
    expected = everywhere((*MATHS, validated), ONE_DEVICE)[case][0]
    assert difference(everywhere((*MATHS, validated), where)[case][0], expected) <= TOLERANCE


@pytest.mark.parametrize("where", [TWO_EACH, TWO_EACH_ON_ONE_RANK], ids=["two ranks", "one rank"])
def test_validation_equals_one_device(where):
    expected_weights, expected = everywhere((*MATHS, validated), ONE_DEVICE)[validated][0]
    by_rank = everywhere((*MATHS, validated), where)[validated]
    assert difference(by_rank[0][0], expected_weights) <= TOLERANCE
    for _, losses in by_rank:
        assert losses == pytest.approx(expected, abs=TOLERANCE)


def replicated(where):
    return fitted_weights(where, SGD(tie_word_embeddings=True), gradient_clip_val=0.2, accumulate_grad_batches=2)


def test_replicas_equal_data_parallelism():
    expected = everywhere((replicated,), DATA_PARALLEL)[replicated][0]
    assert difference(everywhere((replicated,), REPLICAS)[replicated][0], expected) <= TOLERANCE


# ---- what the user is shown ----------------------------------------------------------------------------------------


class KeptSummary(ModelSummary):
    """Keeps what it would print."""

    def summarize(self, *args, **kwargs):
        self.shown = [*args, *sorted(kwargs.items())]


def summary(where):
    callback = KeptSummary(max_depth=-1)
    fit(where, FineTune(tie_word_embeddings=True), rows(), callbacks=[callback], max_steps=1)
    return getattr(callback, "shown", None)


def recut(where):
    """Fit once, then again by a Trainer that wants one stage on each rank; the error."""
    module = FineTune()
    fit(where, module, rows(), max_steps=1)
    trainer = L.Trainer(**QUIET, devices=where.devices, strategy=Seq1F1BStrategy(num_chunks=3))
    with pytest.raises(ValueError) as caught:
        trainer.fit(module, rows())
    return str(caught.value)


def test_summary_counts_the_whole_model():
    (expected,) = everywhere((summary,), ONE_DEVICE)[summary]
    first, other = everywhere((summary, recut), TWO_EACH)[summary]
    assert first == expected
    assert other is None


def test_a_module_is_not_cut_a_second_time_into_other_stages():
    for message in everywhere((summary, recut), TWO_EACH)[recut]:
        assert "cut into 2 x 2 stage(s) by an earlier Trainer and cannot be cut into 2 stage(s)" in message


@pytest.mark.parametrize(
    ("num_ranks", "virtual_stages", "expected"),
    [
        (2, 1, "on 2 stage(s) x 1 replica(s); layers on each pipeline rank: 0: 0-1, 1: 2-3"),
        (2, 2, "on 2 rank(s) x 2 virtual stages x 1 replica(s); layers on each pipeline rank: 0: 0 and 2, 1: 1 and 3"),
        (1, 4, "on 1 rank(s) x 4 virtual stages x 1 replica(s); layers on each pipeline rank: 0: 0 and 1 and 2 and 3"),
    ],
)
def test_the_report_says_which_layers_are_where(num_ranks, virtual_stages, expected):
    module = FineTune()
    module.configure_model()
    cut = CutModule(module, Topology(0, num_ranks, num_ranks), virtual_stages)
    assert f"LlamaForCausalLM by schedule 'seq1f1b' {expected}" in describe(cut, "seq1f1b")


# ---- checkpoints ---------------------------------------------------------------------------------------------------

EPOCHS = 2
AFTER_EPOCH = "epoch=0.ckpt"


def write(root: Path, name: str, where):
    resumable_fit(where, root / name, 1)


def resume(root: Path, source: str, name: str, where):
    resumable_fit(where, root / name, EPOCHS, ckpt_path=root / source / AFTER_EPOCH)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder of checkpoints: of an uninterrupted run on one device, and of runs that went on somewhere else."""
    root = tmp_path_factory.mktemp("virtual")
    resumable_fit(ONE_DEVICE, root / "whole", EPOCHS)
    there = (
        functools.partial(write, root, "virtual"),
        functools.partial(resume, root, "whole", "one-to-virtual"),
    )
    everywhere(there, TWO_EACH)
    for name, where in (("one", ONE_DEVICE), ("two", TWO_STAGES)):
        everywhere((functools.partial(resume, root, "virtual", f"virtual-to-{name}"),), where)
    return root


def test_the_file_is_that_of_one_device(root):
    assert_same_content(root / "virtual" / AFTER_EPOCH, root / "whole" / AFTER_EPOCH)
    module = Resumable.load_from_checkpoint(root / "virtual" / AFTER_EPOCH, map_location="cpu")
    assert list(module.state_dict()) == list(load(root / "whole" / AFTER_EPOCH)["state_dict"])


@pytest.mark.parametrize("name", ["one-to-virtual", "virtual-to-one", "virtual-to-two"])
def test_runs_go_on_with_other_stages(root, name):
    assert_same_content(root / name / END, root / "whole" / END)
