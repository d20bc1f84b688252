"""The memory that the pipeline benchmark reports, against sizes known beforehand."""

import pytest
import torch

from benchmarks.live_bytes import LiveBytes
from benchmarks.pipeline_memory import activation_growth, peak_allocated, tokens_in_flight
from lightning_seq1f1b.schedule.actions import Action, Kind, Unit
from lightning_seq1f1b.schedule.partition import even
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.spans import Span

MIB = 2**20


def test_peak_counts_what_is_alive_at_once():
    before = torch.zeros(MIB, dtype=torch.uint8)

    def run() -> None:
        first = torch.zeros(4 * MIB, dtype=torch.uint8)
        del first
        second, third = before + 1, torch.zeros(2 * MIB, dtype=torch.uint8)
        del second, third
        torch.zeros(MIB, dtype=torch.uint8)

    assert peak_allocated(run) == 4 * MIB


def test_peak_counts_what_backward_makes():
    leaf = torch.ones(MIB, requires_grad=True)
    leaf.grad = torch.zeros(MIB)
    # The output, and the gradients of output and leaf, 4 MiB each.
    assert peak_allocated(lambda: (leaf * 2).backward(torch.ones(MIB))) == pytest.approx(3 * 4 * MIB, abs=1024)


def test_live_bytes_leaves_out_what_it_is_told_to():
    kept = torch.zeros(MIB, dtype=torch.uint8)
    with LiveBytes([kept]) as live:
        view = kept[:10]
        made = torch.zeros(2 * MIB, dtype=torch.uint8)
        assert live.held() == 2 * MIB
        del made
        assert live.held() == 0
    assert view.numel() == 10


def test_activation_growth_counts_from_the_first_microbatch():
    action = Action(Kind.F, 0, Unit(0, 0))
    assert activation_growth([(action, held) for held in (10, 20, 25, 15, 30, 0)], units=2) == 1.5


@pytest.mark.parametrize(("schedule", "virtual"), [("seq1f1b", 1), ("interleaved_seq1f1b_zb", 2)])
def test_tokens_in_flight_is_the_formula_for_even_chunks(schedule, virtual):
    plan = make_plan(schedule, 2, 4, 8, virtual_stages=virtual)
    assert tokens_in_flight(plan, even(4096, 8)) == 1 + 1 / (virtual * 8)


def test_tokens_in_flight_of_uneven_chunks_by_hand():
    # Rank 0 holds the first microbatch and the long chunk of the second: 3 + 1 + 3 of 4 tokens.
    assert tokens_in_flight(make_plan("seq1f1b", 2, 2, 2), [Span(0, 3), Span(3, 4)]) == 7 / 4
