"""Timelines that go through a file come back as they were, and files that hold none are refused."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from lightning_seq1f1b.schedule.actions import Action
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import Costs, simulate
from lightning_seq1f1b.schedule.timeline import Event
from lightning_seq1f1b.schedule.timeline_file import load, save


def test_a_measured_timeline_comes_back(tmp_path: Path) -> None:
    events = [
        Event(0, Action.parse("0F0.0"), 100.125, 100.25),
        Event(0, Action.parse("2F0.0"), 100.5, 100.75),
        Event(1, Action.parse("3I0.0"), 101.0, 101.1),
        Event(1, Action.parse("3W0.0"), 101.1, 101.3),
    ]
    save(tmp_path / "step.json", events, schedule="interleaved_seq1f1b_zb")
    recording = load(tmp_path / "step.json")
    assert list(recording.events) == events
    assert (recording.schedule, recording.time_unit) == ("interleaved_seq1f1b_zb", "s")


def test_a_simulated_timeline_is_described(tmp_path: Path) -> None:
    plan = make_plan("interleaved_seq1f1b_zb", 2, 3, 4, virtual_stages=2)
    simulation = simulate(plan, Costs(Fraction(1), Fraction(1), Fraction(1), 4, virtual_stages=2))
    timeline, settings = simulation.timeline, {"memory_knob": 1, "activation_cap": plan.activation_cap}
    save(tmp_path / "step.json", timeline, schedule=plan.schedule, time_unit=None, **settings)
    content = json.loads((tmp_path / "step.json").read_text())
    assert len(content.pop("timeline")) == 4 * 3 * 4 * 3
    assert content == {
        "schedule": "interleaved_seq1f1b_zb",
        "stages": 2,
        "virtual_stages": 2,
        "microbatches": 3,
        "chunks": 4,
        "memory_knob": 1,
        "activation_cap": plan.activation_cap,
        "time_unit": None,
    }
    recording = load(tmp_path / "step.json")
    assert [(event.rank, event.action) for event in recording.events] == [
        (event.rank, event.action) for event in timeline
    ]
    assert (recording.num_ranks, recording.num_stages, recording.virtual_stages) == (2, 4, 2)
    assert (recording.num_microbatches, recording.num_chunks) == (3, 4)
    assert (recording.memory_knob, recording.activation_cap) == (1, plan.activation_cap)
    assert recording.peak_units == simulation.peak_units


def test_a_file_without_settings_is_read(tmp_path: Path) -> None:
    event = '{"rank": 0, "action": "0F0.0", "start": 0.0, "end": 1.0}'
    (tmp_path / "step.json").write_text(f'{{"schedule": "seq1f1b", "timeline": [{event}]}}')
    recording = load(tmp_path / "step.json")
    assert (recording.schedule, recording.memory_knob, recording.activation_cap) == ("seq1f1b", None, None)


def test_swapped_arguments_are_pointed_out(tmp_path: Path) -> None:
    events = [Event(0, Action.parse("0F0.0"), 0.0, 1.0)]
    with pytest.raises(ValueError, match=r"the path comes first and the events second: save\(path, events\)"):
        save(events, tmp_path / "step.json")


def test_transfers_are_left_out(tmp_path: Path) -> None:
    forward = Event(0, Action.parse("0F0.0"), 0.0, 1.0)
    save(tmp_path / "step.json", [forward, Event(0, Action.parse("0SEND_F0.0"), 1.0, 1.5)])
    assert load(tmp_path / "step.json").events == (forward,)
    with pytest.raises(ValueError, match="no compute action"):
        save(tmp_path / "empty.json", [])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not JSON"),
        ("[]", "no list 'timeline'"),
        ('{"timeline": 3}', "no list 'timeline'"),
        ('{"timeline": []}', "is empty"),
        ('{"timeline": [3]}', "an event is not like"),
        ('{"timeline": [{"rank": 0, "action": "0F0.0", "start": 0.0}]}', "an event is not like.*'end'"),
        ('{"timeline": [{"rank": 0, "action": "F0", "start": 0.0, "end": 1.0}]}', "'F0' is no action like"),
        ('{"timeline": [{"rank": 0, "action": "0F0.0", "start": 2.0, "end": 1.0}]}', "ends after it starts"),
        ('{"timeline": [{"rank": 0, "action": "0F0.0", "start": NaN, "end": 1.0}]}', "ends after it starts"),
        ('{"timeline": [{"rank": -1, "action": "0F0.0", "start": 0.0, "end": 1.0}]}', "no compute action of a rank"),
        ('{"timeline": [{"rank": 0, "action": "0SEND_F0.0", "start": 0.0, "end": 1.0}]}', "no compute action"),
        (
            '{"memory_knob": "2", "timeline": [{"rank": 0, "action": "0F0.0", "start": 0.0, "end": 1.0}]}',
            "memory_knob must be null or at least 1, not '2'",
        ),
    ],
)
def test_what_is_no_timeline_is_refused(content: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=complaint) as refusal:
        load(path)
    assert str(path) in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json' cannot be read: No such file"):
        load(tmp_path / "absent.json")
