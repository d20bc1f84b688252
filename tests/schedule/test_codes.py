"""Actions as integers, and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.actions import Action, Kind
from lightning_seq1f1b.schedule.codes import KINDS, Codes

codes = st.builds(Codes, st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=6).map(tuple))


@given(codes)
def test_every_code_is_one_action(codes: Codes) -> None:
    actions = codes.decode_row(range(8 * codes.num_indices))
    assert len(set(actions)) == 8 * codes.num_stages * sum(codes.chunks)
    assert codes.encode_row(actions) == tuple(range(8 * codes.num_indices))


def test_neighbours_are_where_they_are_said_to_be() -> None:
    codes = Codes(num_stages=3, chunks=(2, 4))
    here = codes.encode(Action.parse("1F1.2"))
    assert codes.decode(here - 8) == Action.parse("1F1.1")
    assert codes.decode(here + 8 * codes.units_on_a_stage) == Action.parse("2F1.2")
    assert KINDS[here % 8] is Kind.F


@pytest.mark.parametrize("text", ["3F0.0", "0W2.0", "0B0.2", "0B1.4"])
def test_foreign_actions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Codes(num_stages=3, chunks=(2, 4)).encode(Action.parse(text))
