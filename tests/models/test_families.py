"""Families of transformers in stages and chunks: exact, or refused with the reason; the rest is in docs/models.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.judging import CHUNK_LENGTHS, judge
from support.tiny_models import tiny_config

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

DOZEN = (
    "llama",
    "qwen3",
    "gemma3_text",
    "gemma2",
    "phi3",
    "gpt2",
    "gpt_neox",
    "mistral",
    "gpt_oss",
    "mixtral",
    "deepseek_v3",
    "qwen3_next",
)


@pytest.mark.parametrize("family", DOZEN)
def test_three_stages_and_four_chunks_are_exact(family: str) -> None:
    verdict = judge(family, "")
    assert (verdict.result, verdict.reason) == ("exact", "")


def test_windows_are_shorter_than_a_chunk() -> None:
    assert tiny_config("mistral").sliding_window < max(CHUNK_LENGTHS)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma4_text", "layer 0 is given more than one tensor with a gradient"),
        ("hy_v4", r"layer 0 is given 4 axes, \[1, 2, 4, 32\]"),
        ("zamba2", "layer 0 is given more than one tensor with a gradient"),
    ],
)
def test_what_cannot_be_cut_is_exact_in_chunks(family: str, reason: str) -> None:
    verdict = judge(family, "")
    assert verdict.result == "exact, one stage"
    assert re.search(reason, verdict.reason)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bart", "computes its loss without handing shift_labels"),
        ("doge", "the result of a token depends on how many tokens follow it"),
        ("dory", r"runs its 2 layers in the order \[0, 1, 0, 1\]"),
        ("mamba", "layers 0, 1, 2, 3 of MambaForCausalLM scan a chunk from an empty state"),
        ("minimax", "MiniMax uses cache of its own"),
        ("moshi", "layer 0 of MoshiForCausalLM attends to all tokens, but its cache keeps 11 only"),
        ("recurrent_gemma", "keeps what a chunk leaves for the next one in objects of its own"),
        ("roberta", "counts positions from the id of its padding token on"),
    ],
)
def test_what_is_not_exact_is_refused(family: str, reason: str) -> None:
    verdict = judge(family, "")
    assert verdict.result == "refused"
    assert re.search(reason, verdict.reason)


def test_the_page_tells_of_every_family_what_became_of_it() -> None:
    _, _, table = PAGE.read_text().partition("| --- | --- | --- | --- |\n")
    rows = [line.strip("|").split("|", 3) for line in table.splitlines()]
    results = {family.strip(): (result.strip(), reason.strip()) for family, _, result, reason in rows}
    assert len(results) > 150
    assert {result for result, _ in results.values()} == {"exact", "exact, one stage", "refused", "not judged"}
    assert all(reason for result, reason in results.values() if result != "exact")
    assert sum(result.startswith("exact") for result, _ in results.values()) >= 115
    assert all(results[family][0] == "exact" for family in DOZEN)
