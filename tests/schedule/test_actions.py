"""Actions say what they are, and their text form parses back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.actions import Action, Kind, Unit

counts = st.integers(0, 10_000)
actions = st.builds(Action, st.sampled_from(Kind), counts, st.builds(Unit, counts, counts))


@given(actions)
def test_text_form_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F1.2", Action(Kind.F, 0, Unit(1, 2))),
        ("3SEND_B0.11", Action(Kind.SEND_B, 3, Unit(0, 11))),
        ("12RECV_F7.0", Action(Kind.RECV_F, 12, Unit(7, 0))),
        ("1W0.0", Action(Kind.W, 1, Unit(0, 0))),
    ],
)
def test_text_form(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize("text", ["", "F0.0", "0X0.0", "0F0", "0F0.0 ", "-1F0.0", "0SEND0.0", "0f0.0", "٣F0.0"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no action"):
        Action.parse(text)


def test_only_layer_work_computes() -> None:
    computing = {kind for kind in Kind if Action(kind, 0, Unit(0, 0)).computes}
    assert computing == {Kind.F, Kind.B, Kind.I, Kind.W}


@given(st.lists(st.tuples(counts, counts), max_size=20))
def test_units_sort_by_microbatch_then_chunk(pairs: list[tuple[int, int]]) -> None:
    units = sorted(Unit(microbatch, chunk) for microbatch, chunk in pairs)
    assert [(unit.microbatch, unit.chunk) for unit in units] == sorted(pairs)
