"""Profiles come back from text as they were, and are refused for anything else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.profile import PARTS, PASSES, Fit, Profile

SHAPE = ModelShape(4, 64, 4, 2, 16, 256, True, 100)
MIXED = replace(SHAPE, layers=tuple(replace(SHAPE.layer(0), window=window) for window in (7, None, 7, 0)))

fits = st.builds(Fit, pairs=st.floats(0, 1), tokens=st.floats(0, 1), constant=st.floats(-1, 1))
passes = st.fixed_dictionaries(dict.fromkeys(PASSES, fits))
profiles = st.builds(
    Profile,
    shape=st.sampled_from([SHAPE, MIXED]),
    rows=st.integers(1, 8),
    dtype=st.just("bfloat16"),
    device=st.text(max_size=5),
    layer=passes,
    embedding=passes,
    head=passes,
)


def a_profile() -> Profile:
    zero = {name: Fit(1e-9, 1e-6, 1e-4) for name in PASSES}
    return Profile(SHAPE, 1, "float32", "a device", zero, zero, zero)


@given(profiles)
def test_profiles_come_back_from_text(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json(), profile.shape) == profile


def test_a_fit_is_linear_in_pairs_and_tokens() -> None:
    assert Fit(pairs=2.0, tokens=3.0, constant=5.0)(100.0, 10.0) == 2 * 100 + 3 * 10 + 5


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(SHAPE, hidden_size=128), "hidden_size 64 instead of 128"),
        (replace(SHAPE, num_layers=5, vocab_size=7), "num_layers 4 instead of 5; vocab_size 100 instead of 7"),
        (MIXED, "(layers of other sizes or windows)"),
    ],
)
def test_a_profile_of_another_model_is_refused(other: ModelShape, said: str) -> None:
    with pytest.raises(ValueError, match="of another model") as caught:
        Profile.from_json(a_profile().to_json(), other)
    assert said in str(caught.value)
    assert "lightning-seq1f1b profile" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "3", '{"format": "lightning_seq1f1b.profile", "version": 1}', '{"format": 1, "version": 1}'],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a profile that"):
        Profile.from_json(text, SHAPE)


@pytest.mark.parametrize("part", ["rows", *PARTS])
def test_a_profile_with_a_part_missing_is_refused(part: str) -> None:
    content = json.loads(a_profile().to_json())
    del content[part]
    with pytest.raises(ValueError, match="not a profile that"):
        Profile.from_json(json.dumps(content), SHAPE)


def test_a_later_version_is_refused() -> None:
    text = a_profile().to_json().replace('"version": 1', '"version": 2')
    with pytest.raises(ValueError, match=r"format is not lightning_seq1f1b\.profile 1"):
        Profile.from_json(text, SHAPE)
