"""Every proven family, with tied and untied embeddings, trains over stages as on one device."""

import pytest
from support.fitting import ONE_DEVICE, TWO_STAGES, difference, everywhere, fit, rows, weights
from support.tiny_models import tiny_config
from support.training import FineTune, Recorder

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt2")
TOLERANCE = 5e-6


def run(where, family, tied):
    recorder = Recorder()
    module = FineTune(family, tie_word_embeddings=tied)
    trainer = fit(where, module, rows(5), callbacks=[recorder], max_epochs=1, gradient_clip_val=0.5)
    return recorder.losses, weights(trainer)


def all_families(where):
    return {(family, tied): run(where, family, tied) for family in FAMILIES for tied in (False, True)}


@pytest.mark.behaviour(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_one_device(family, tied):
    expected_losses, expected_weights = everywhere((all_families,), ONE_DEVICE)[all_families][0][family, tied]
    by_rank = everywhere((all_families,), TWO_STAGES)[all_families]
    for results in by_rank:
        assert results[family, tied][0] == pytest.approx(expected_losses, abs=TOLERANCE)
    assert difference(by_rank[0][family, tied][1], expected_weights) <= TOLERANCE


def test_windows_are_shorter_than_a_row():
    assert tiny_config("mistral").sliding_window < next(iter(rows()))["input_ids"].shape[1]
