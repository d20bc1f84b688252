"""The fault drill notices what does not end as it should. The whole drill is `make fault-drill`."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from support.drill_faults import MOMENTS, Fault, faults
from support.drill_program import WORLD_SIZE
from support.endings import run_to_the_end
from support.failing import say_when
from support.fault_drill import drill, make_truth
from support.soak import Sizes, growth


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return make_truth(tmp_path_factory.mktemp("truth"), ["full"])


@pytest.fixture(scope="module")
def results(truth, tmp_path_factory):
    """One fault with right expectations, and the same one with wrong ones."""
    fault = next(fault for fault in faults() if fault.name == "exception in backward")
    right = drill(fault, truth, tmp_path_factory.mktemp("right") / "fault")
    wrong = replace(fault, says="another cause", limit_s=1e-3, ends=-9)
    lost = replace(truth, losses=[0.0] * len(truth.losses))
    return right, drill(wrong, lost, tmp_path_factory.mktemp("wrong") / "fault")


def test_a_fault_that_ends_well_passes(results):
    right, _ = results
    assert right.passed, right.why
    assert right.statuses == [1] * WORLD_SIZE
    assert right.seconds < right.limit_s


def test_wrong_expectations_are_reported(results):
    _, wrong = results
    assert not wrong.passed
    assert not wrong.checks["in time"]
    assert not wrong.checks["statuses"]
    assert not wrong.checks["checkpoint"]
    assert not next(held for what, held in wrong.checks.items() if "another cause" in what)
    assert "another cause" in "".join(wrong.why)


def test_a_program_that_goes_on_is_not_taken_for_one_that_failed(truth, tmp_path):
    fault = Fault("nothing", "", 0, "anything")
    result = drill(fault, truth, tmp_path / "nothing")
    assert not result.passed
    assert "the program did not fail" in "".join(result.why)


def lingers():
    """A program that says it fails, and stays."""
    say_when()
    time.sleep(100)


def test_what_does_not_end_is_told_and_ended(tmp_path):
    ending = run_to_the_end(lingers, 1, tmp_path / "output", limit_s=0.5)
    assert ending.statuses == [None]
    assert len(ending.left) == 1
    assert ending.left[0].startswith("process ")


def test_every_fault_has_a_name_of_its_own_and_saves_are_killed_at_all_times():
    names = [fault.name for fault in faults()]
    assert len(set(names)) == len(names)
    killed = [fault for fault in faults() if fault.place == "killed while saving"]
    assert len(killed) == MOMENTS == len({int(fault.moment * MOMENTS) for fault in killed})
    assert {(fault.sharded, fault.rank) for fault in killed} == {(s, r) for s in (True, False) for r in (0, 1)}


def grown(**last):
    """Sizes of which the last ones differ."""
    sizes = [Sizes(step, 100 << 20, 50, 40, 30, 1000) for step in range(90, 200, 20)]
    return growth([*sizes[:-1], replace(sizes[-1], **last)])


def test_the_soak_run_notices_growth():
    assert grown() == []
    assert grown(tensors=51) == ["tensors grew from 50 to 51"]
    assert grown(handles=41) == ["handles grew from 40 to 41"]
    assert grown(threads=31) == ["threads grew from 30 to 31"]
    assert len(grown(resident=120 << 20)) == 1
