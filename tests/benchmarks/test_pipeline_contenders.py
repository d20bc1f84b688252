"""Both sides of the pipeline benchmark train the same stack and are timed by one rule."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.processes import run_processes

from benchmarks.pipeline import names
from benchmarks.pipeline_contender import Job
from benchmarks.pipeline_measure import check_numbers, measure
from benchmarks.pipeline_stack import Part, Sizes, whole_plain
from benchmarks.pipeline_torch import replay
from lightning_seq1f1b.runtime.topology import Topology, make_groups
from lightning_seq1f1b.schedule.actions import Action, Kind, Unit
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import simulate

TINY = Sizes(hidden=16, heads=2, kv_heads=1, inner=24, vocabulary=11, layers=4, length=48)


def measured(rank: int, microbatches: int, attentions: list[str]) -> list[dict]:
    dist.init_process_group("gloo")
    groups = make_groups(Topology(rank, 2, 2), timedelta(minutes=1))
    job = Job(rank, 2, TINY, torch.float64, microbatches)
    return measure(job, "float64", names(microbatches, [4], attentions), 2, groups)


def one_device(microbatches: int) -> tuple[float, float]:
    """Loss and gradient norm of the whole stack in one piece."""
    job = Job(0, 1, TINY, torch.float64, microbatches)
    part = Part(TINY, 0, 1, torch.float64)
    logits = part(job.input_ids(), [whole_plain] * TINY.layers)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), job.input_ids()[:, 1:].flatten())
    loss.backward()
    return float(loss.detach()), float(torch.nn.utils.get_total_norm([p.grad for p in part.parameters()]))


@pytest.mark.parametrize(("microbatches", "attentions"), [(1, ["plain"]), (2, ["plain", "native"])])
def test_all_pipelines_train_like_one_device(microbatches, attentions):
    rows = run_processes(measured, 2, microbatches, attentions)[0]
    assert [row["schedule"] for row in rows] == [name.schedule for name in names(microbatches, [4], attentions)]
    loss, norm = one_device(microbatches)
    for row in rows:
        assert row["loss"] == pytest.approx(loss, rel=1e-10)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-9)
        assert 0 < row["simulated_s"] < row["cpu_s"]
        assert row["tokens_per_s"] == pytest.approx(microbatches * TINY.length / row["step_s"])
        assert row["peak_bytes"] > 0


def test_every_cut_has_the_same_weights():
    whole = Part(TINY, 0, 1, torch.float64).state_dict()
    found = {}
    for index in range(4):
        for name, value in Part(TINY, index, 4, torch.float64).state_dict().items():
            found[name.replace("layers.0.", f"layers.{index}.")] = value
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_1f1b_is_left_out_where_torch_refuses_it():
    schedules = {
        microbatches: [name.schedule for name in names(microbatches, [4], ["plain"])] for microbatches in (1, 2)
    }
    assert "torch.1f1b" not in schedules[1]
    assert "torch.1f1b" in schedules[2]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_replay_equals_the_simulator(schedule):
    plan = make_plan(schedule, 3, 4, 1)
    units = [[(a, 1.0 + a.stage + (a.kind is Kind.B) * (2.5 + a.unit.microbatch)) for a in row] for row in plan.compute]
    seconds = dict(unit for row in units for unit in row)
    assert replay(units) == simulate(plan, seconds.__getitem__).makespan


def test_replay_of_a_split_backward_by_hand():
    def unit(kind: Kind, stage: int, seconds: float) -> tuple[Action, float]:
        return Action(kind, stage, Unit(0, 0)), seconds

    first = [unit(Kind.F, 0, 1.0), unit(Kind.I, 0, 2.0), unit(Kind.W, 0, 4.0)]
    last = [unit(Kind.F, 1, 1.0), unit(Kind.I, 1, 3.0), unit(Kind.W, 1, 9.0)]
    assert replay([first, last]) == 1 + 1 + 3 + 9
    assert replay([first, [*last[:2], unit(Kind.W, 1, 1.0)]]) == 1 + 1 + 3 + 2 + 4


def test_replay_refuses_an_order_that_stalls():
    stage = [[(Action(kind, rank, Unit(0, 0)), 1.0) for kind in (Kind.B, Kind.F)] for rank in range(2)]
    with pytest.raises(ValueError, match="wait for each other"):
        replay([stage[0], [(Action(Kind.F, 1, Unit(0, 0)), 1.0)]])


def test_different_numbers_are_refused():
    row = {"schedule": "a", "partition": "even", "chunks": 4, "attention": "plain", "loss": 2.0, "grad_norm": 1.0}
    check_numbers([row, {**row, "loss": 2.0 + 1e-6}], 1e-5)
    with pytest.raises(RuntimeError, match="grad_norm"):
        check_numbers([row, {**row, "grad_norm": 1.1}], 1e-5)
