"""`schedule="auto"`: the planner decides, alike on all ranks, and training equals one device."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from support.fitting import ONE_DEVICE, Where, difference, everywhere, fit, rows, weights
from support.planner_problems import random_problem
from support.processes import run_processes
from support.tiny_models import tiny_model
from support.training import QUIET, FineTune

from lightning_seq1f1b import Seq1F1BStrategy
from lightning_seq1f1b.models.shape import model_shape
from lightning_seq1f1b.runtime.topology import Topology
from lightning_seq1f1b.schedule.estimate import MACHINES
from lightning_seq1f1b.schedule.planner import Knobs
from lightning_seq1f1b.schedule.planner.search import search
from lightning_seq1f1b.schedule.profile import PASSES, Fit, Profile
from lightning_seq1f1b.strategy import automatic
from lightning_seq1f1b.strategy.automatic import AutomaticCutting, best_setting, knobs_of, machine_of, training_of
from lightning_seq1f1b.strategy.cut_module import CutModule

LENGTH = 161
"""Long enough for the planner to consider two chunks."""

PLANNED = Where(2, (("schedule", "auto"), ("num_chunks", "auto")))


def trained(where):
    trainer = fit(where, FineTune(), rows(length=LENGTH))
    return weights(trainer), decided(trainer)


def decided(trainer: L.Trainer) -> dict | None:
    """What the strategy would do with a batch of three rows."""
    strategy = trainer.strategy
    if not isinstance(strategy, Seq1F1BStrategy):
        return None
    cutting = strategy._pipeline.cutting.for_batch(3, LENGTH)
    return {**vars(cutting), "layers": strategy._cut.layers, "stages": sorted(strategy._cut.stages)}


def again(where):
    """A second Trainer, with a strategy of its own, goes on with the module as it is cut."""
    module = FineTune()
    first = decided(fit(where, module, rows(length=LENGTH), max_steps=1))
    second = decided(fit(where, module, rows(length=LENGTH), max_steps=1))
    return first["layers"], first["virtual_stages"], second["layers"], second["virtual_stages"]


CASES = (trained, again)


def test_training_equals_one_device():
    ((expected, _),) = everywhere((trained,), ONE_DEVICE)[trained]
    (got, _), _ = everywhere(CASES, PLANNED)[trained]
    assert difference(got, expected) < 5e-6


def test_all_ranks_decide_the_same_and_leave_nothing_open():
    (_, first), (_, other) = everywhere(CASES, PLANNED)[trained]
    own = sorted(range(0, len(first["layers"]), 2)), sorted(range(1, len(first["layers"]), 2))
    assert (first.pop("stages"), other.pop("stages")) == own
    assert first == other
    assert first["schedule"] != "auto"
    assert first["num_chunks"] is not None
    assert sum(first["layers"]) == 4


def test_a_second_trainer_keeps_the_stages():
    for layers, virtual_stages, later_layers, later_virtual_stages in everywhere(CASES, PLANNED)[again]:
        assert (layers, virtual_stages) == (later_layers, later_virtual_stages)


def test_the_users_knobs_are_kept():
    assert knobs_of("auto", "auto", None, "balanced", None) == Knobs()
    assert knobs_of(2, 4, 3, "even", [1, 1, 1, 1]) == Knobs(None, 2, 4, 3, 0.0, (1, 1, 1, 1))
    assert knobs_of("auto", "auto", None, [5, 3], None).partition == (5, 3)
    assert knobs_of("auto", "auto", None, 0.5, None).partition == 0.5


def cutting(**changes) -> AutomaticCutting:
    problem = replace(random_problem(1), **{"num_ranks": 2, "shortest_chunk": 256, **changes})
    layers = (1,) * 3 + (problem.shape.num_layers - 3,)
    return AutomaticCutting.of(problem, 2, layers, None)


def test_batches_of_similar_lengths_share_a_plan():
    chosen = {length: cutting().for_batch(4, length) for length in (3585, 3800, 4096)}
    assert len(set(chosen.values())) == 1
    expected = search(replace(cutting().problem, length=4096, num_microbatches=4)).best.setting
    (one,) = set(chosen.values())
    assert (one.schedule, one.num_chunks, one.partition) == (expected.schedule, expected.num_chunks, expected.partition)
    assert one.virtual_stages == 2
    spans = one.spans(3585, 2, cutting().problem.shape)
    assert spans[-1].stop == 3585


def test_rows_share_microbatches_as_asked():
    asked = replace(cutting(), num_microbatches=2)
    assert asked.for_batch(5, 1024).num_microbatches == 2
    assert len(asked.for_batch(5, 1024).groups({"input_ids": torch.zeros(5, 1024, dtype=torch.long)})) == 2


def test_short_rows_have_at_most_a_chunk_a_token():
    small = cutting(multiple=1, shortest_chunk=1)
    for length in (1, 2, 3, 5):
        assert small.for_batch(2, length).num_chunks <= length


def test_listed_chunks_are_planned_at_their_own_length():
    listed = replace(cutting().problem.knobs, partition=(700, 301))
    chosen = AutomaticCutting.of(replace(cutting().problem, knobs=listed), 2, cutting().problem.knobs.layers, None)
    one = chosen.for_batch(2, 1001)
    assert (one.num_chunks, one.partition) == (2, (700, 301))


def test_where_nothing_fits_the_smallest_is_tried_with_one_warning(monkeypatch):
    problem = replace(random_problem(4), memory=1.0)
    with pytest.warns(UserWarning, match="no setting fits into 1 bytes a rank: the smallest needs"):
        setting = best_setting(problem)
    # Batch after batch asks the same; none of them may search again.
    monkeypatch.setattr(automatic, "choose", None)
    assert best_setting(replace(random_problem(4), memory=1.0)) == setting


def test_bytes_and_shares_come_from_the_model():
    model = tiny_model("llama", torch.float32)
    full = training_of(model, "32-true", torch.device("cpu"))
    assert (full.weight_bytes, full.gradient_bytes, full.optimizer_bytes, full.activation_bytes) == (4, 4, 8, 4)
    assert (full.trainable_share, full.recompute) == (1, False)
    half = training_of(tiny_model("llama", torch.float32).bfloat16(), "bf16-true", torch.device("cpu"))
    assert (half.weight_bytes, half.gradient_bytes) == (2, 4)
    mixed = training_of(model, "bf16-mixed", torch.device("cpu"))
    assert (mixed.weight_bytes, mixed.activation_bytes) == (6, 2)
    for parameter in model.model.layers.parameters():
        parameter.requires_grad_(False)
    new_name = hasattr(model, "activation_checkpointing_enable")  # from transformers 5.24 on
    getattr(model, "activation_checkpointing_enable" if new_name else "gradient_checkpointing_enable")()
    part = training_of(model, "32-true", torch.device("cpu"))
    total, frozen = (sum(p.numel() for p in each.parameters()) for each in (model, model.model.layers))
    assert part.trainable_share == pytest.approx(1 - frozen / total)
    assert part.recompute


def test_the_machine_is_known_by_the_devices_name(monkeypatch):
    assert machine_of(torch.device("cpu")) == MACHINES["cpu"]
    for name, preset in (("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("unheard of", "h100")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert machine_of(torch.device("cuda", 0)) == MACHINES[preset]


def fit_with_a_profile(rank, path):
    """What the strategy has read of the layers' times, or why it refused to."""
    strategy = Seq1F1BStrategy(schedule="auto", profile=path)
    try:
        L.Trainer(**{**QUIET, "max_steps": 1}, devices=1, strategy=strategy).fit(FineTune(), rows(length=LENGTH))
    except ValueError as error:
        return str(error)
    return strategy._problem.profile.layer


def test_a_profile_decides_on_one_rank_too(tmp_path: Path):
    """One rank has no bubble: whole rows, unless the profile says that they are slower than chunks."""
    shape = model_shape(tiny_model("llama", torch.float32).config)
    slow = {name: Fit(1e-3, 0.0, 0.0) for name in PASSES}
    none = {name: Fit(0.0, 0.0, 0.0) for name in PASSES}
    (tmp_path / "profile.json").write_text(Profile(shape, 1, "float32", "cpu", slow, none, none).to_json())
    (read,) = run_processes(fit_with_a_profile, 1, str(tmp_path / "profile.json"))
    assert read == slow


def test_a_profile_that_is_nowhere_is_refused_at_once():
    with pytest.raises(ValueError, match="profile='nofile' is no file here"):
        Seq1F1BStrategy(schedule="auto", profile="nofile")


@pytest.mark.parametrize(
    ("data", "knobs", "said"),
    [
        (None, Knobs(), True),
        (SimpleNamespace(sequence_length=512, batch_size=2), Knobs(), False),
        (None, Knobs(virtual_stages=1, layers=(2, 2)), False),
    ],
)
def test_a_length_that_is_only_assumed_is_said(monkeypatch, data, knobs, said):
    told = []
    monkeypatch.setattr(automatic, "rank_zero_info", told.append)
    model = tiny_model("llama", torch.float32)
    fixed = {"num_ranks": 2, "device": torch.device("cpu"), "precision": "32-true", "multiple": 16, "profile": None}
    automatic.problem_for(model, model_shape(model.config), data=data, knobs=knobs, **fixed)
    assert len(told) == said
    assert all("rows of 4096 tokens" in text and "sequence_length" in text for text in told)


def test_a_profile_of_another_model_is_refused(tmp_path: Path):
    shape = model_shape(tiny_model("llama", torch.float32, hidden_size=64).config)
    none = {name: Fit(0.0, 0.0, 0.0) for name in PASSES}
    (tmp_path / "profile.json").write_text(Profile(shape, 1, "float32", "cpu", none, none, none).to_json())
    (said,) = run_processes(fit_with_a_profile, 1, str(tmp_path / "profile.json"))
    assert re.search(r"profile=.*is of another model", said)


def test_layers_of_every_stage_are_the_users():
    module = FineTune()
    module.configure_model()
    cut = CutModule(module, Topology(0, 2, 2), 1, [1, 3])
    assert cut.layers == (1, 3)
    assert cut.layer_ranges == (range(1), range(1, 4))


@pytest.mark.parametrize("layers", [[1, 2], [4], [1, 1, 2]])
def test_layers_that_do_not_fit_are_refused(layers):
    module = FineTune()
    module.configure_model()
    with pytest.raises(ValueError, match=r"but the model has 4 layers for 2 ranks x 1 virtual stages"):
        CutModule(module, Topology(0, 2, 2), 1, layers)
