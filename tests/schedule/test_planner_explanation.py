"""What the planner says: why the winner wins, and what to do when nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lightning_seq1f1b.schedule.costs import ModelShape
from lightning_seq1f1b.schedule.estimate import Machine, Training
from lightning_seq1f1b.schedule.planner import Knobs, Problem
from lightning_seq1f1b.schedule.planner.explanation import does_not_fit, explain, size, words
from lightning_seq1f1b.schedule.planner.search import DoesNotFitError, search
from lightning_seq1f1b.schedule.planner.settings import Setting

SHAPE = ModelShape(8, 1024, 8, 2, 128, 4096, True, 4096)
MACHINE = Machine(5e13, 3e13, 1e14, None, 5e10, 1e-5, 1e-5)
PROBLEM = Problem(SHAPE, 4, 16384, 4, Training(), MACHINE, multiple=128, shortest_chunk=1024)


def test_few_microbatches_the_flagship_wins_and_each_of_its_parts_is_weighed():
    sentences = explain(search(PROBLEM))
    assert sentences[0].startswith("interleaved_seq1f1b_zb, 2 virtual stages, ")
    assert "4 microbatches on 4 ranks" in sentences[0]
    starts = [sentence.partition(":")[0] for sentence in sentences[1:]]
    assert starts == ["Chunks", "Interleaving", "Split backward", "Chunk boundaries"]
    for sentence in sentences[1:4]:
        assert "longer at best" in sentence


def test_many_microbatches_plain_interleaving_wins_and_it_says_so():
    """With adapters there are no weight gradients to fill idle time with, and small chunks cost what they cost."""
    problem = replace(PROBLEM, machine=replace(MACHINE, launch=2e-4), training=Training(trainable_share=0.0))
    ranking = search(replace(problem, num_microbatches=128, length=2048, shortest_chunk=256))
    assert ranking.best.setting.schedule == "interleaved_1f1b"
    sentences = explain(ranking)
    assert sentences[1].startswith("Plain interleaving wins: with 128 microbatches")
    (chunks,) = (sentence for sentence in sentences if sentence.startswith("Chunks:"))
    assert "smaller kernels are less efficient" in chunks


def test_adapters_alone_split_nothing():
    """Without weight gradients there is nothing to move; interleaving is what helps."""
    ranking = search(replace(PROBLEM, training=Training(trainable_share=0.0)))
    assert ranking.best.setting.schedule == "interleaved_seq1f1b"
    (split,) = (sentence for sentence in explain(ranking) if sentence.startswith("Split backward:"))
    assert "no gain to speak of" in split


@pytest.mark.parametrize(("seconds", "word"), [(0.999, "0.1% less"), (1.001, "0.1% longer"), (1.0, "as long")])
def test_a_rival_that_is_as_fast_is_called_so(seconds, word):
    """Whichever of the two is chosen; what is simpler in other respects may be a little slower."""
    ranking = search(PROBLEM)
    best = ranking.best
    for chunks in (1, 4):
        mine = replace(best, setting=replace(best.setting, num_chunks=chunks))
        rival = replace(mine, setting=replace(mine.setting, num_chunks=5 - chunks), seconds=seconds * best.seconds)
        sentence = explain(replace(ranking, predictions=(mine, rival)))[1]
        assert sentence.startswith("Chunks: ")
        assert word in sentence
        assert "-" not in sentence


def test_idle_time_is_told_in_points_that_add_up():
    said = explain(search(PROBLEM))[0]
    idle, schedule, layers = (float(number) for number in re.findall(r"(\d+\.\d)(?:%| points)", said))
    assert idle == pytest.approx(schedule + layers, abs=0.11)


def test_what_the_memory_rules_out_is_counted():
    free = search(PROBLEM).best
    ranking = search(replace(PROBLEM, memory=0.95 * free.peak))
    last = explain(ranking)[-1]
    assert ranking.too_large > 0
    assert last.startswith(f"Memory: {ranking.too_large} of {ranking.considered} settings do not fit")


def test_a_single_setting_is_explained_without_rivals():
    setting = {"schedule": "seq1f1b", "num_chunks": 4, "partition": 1.0, "layers": (2, 2, 2, 2)}
    sentences = explain(search(replace(PROBLEM, knobs=Knobs(**setting))))
    assert len(sentences) == 1
    assert sentences[0].startswith("seq1f1b, 4 chunks (balanced): ")


@pytest.mark.parametrize(
    ("training", "present", "absent"),
    [
        (Training(), ("computed again", "adapters"), ()),
        (
            Training(recompute=True, trainable_share=0.1),
            ("more ranks, or shorter rows",),
            ("computed again", "adapters"),
        ),
    ],
)
def test_what_helps_when_nothing_fits(training, present, absent):
    problem = replace(PROBLEM, training=training, memory=2.0**20)
    with pytest.raises(DoesNotFitError) as refusal:
        search(problem)
    sentence = does_not_fit(refusal.value, problem)
    assert "no setting fits into 1 MiB a rank: the smallest needs" in sentence
    assert words(refusal.value.smallest.setting) in sentence
    for part in present:
        assert part in sentence
    for part in absent:
        assert part not in sentence


def test_settings_in_words():
    setting = Setting("interleaved_seq1f1b_zb", 2, 8, 3, 0.75, (1,) * 8)
    assert words(setting) == "interleaved_seq1f1b_zb, 2 virtual stages, 8 chunks (75% balanced), memory knob 3"
    assert words(Setting("1f1b", 1, 1, None, 1.0, (2,) * 4)) == "1f1b"
    assert words(Setting("seq1f1b", 1, 2, None, (3, 5), (2,) * 4)) == "seq1f1b, 2 chunks (listed)"


def test_sizes_in_words():
    assert size(80 * 2**30) == "80 GiB"
    assert size(999) == "999 bytes"
    assert size(1000) == "0.977 KiB"
    assert size(79.25 * 2**30) == "79.2 GiB"
