"""Sent tensors are let go of while the step runs, and never before their receiver has taken them."""

import itertools

import pytest

from lightning_seq1f1b.runtime.departures import Departures
from lightning_seq1f1b.schedule.actions import Kind
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import simulate

# That no departure is waited for too early is checked by every test that runs the executor on threads:
# an in-process departure raises when its message has not been taken.


class Sent:
    def __init__(self, kept):
        self.kept = kept
        kept.add(self)

    def wait(self):
        self.kept.remove(self)


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "virtual_stages"),
    [
        *itertools.product(["seq1f1b", "seq1f1b_zb"], [2, 3, 4], [1]),
        *itertools.product(["interleaved_seq1f1b", "interleaved_seq1f1b_zb"], [2, 3], [2, 3]),
    ],
)
@pytest.mark.parametrize(("num_microbatches", "num_chunks"), list(itertools.product([1, 6], [1, 3, 4])))
def test_no_more_is_kept_than_is_in_flight(schedule, num_ranks, virtual_stages, num_microbatches, num_chunks):
    plan = make_plan(schedule, num_ranks, num_microbatches, num_chunks, virtual_stages=virtual_stages)
    peaks = simulate(plan, lambda action: 1).peak_units
    for rank, actions in enumerate(plan.actions):
        departures, kept = Departures(plan, rank), {Kind.SEND_F: set(), Kind.SEND_B: set()}
        most = dict.fromkeys(kept, 0)
        received = []
        for action in actions:
            if action.kind in kept:
                departures.add(action, Sent(kept[action.kind]))
                most[action.kind] = max(most[action.kind], len(kept[action.kind]))
            elif action.computes:
                # The executor takes what a compute action needs right before it.
                received = [a for a in received if not taken_by(a, action, departures)]
            else:
                received.append(action)
        assert received == []
        assert most[Kind.SEND_F] <= peaks[rank]
        # With several stages on a rank, the last group's gradients of all but one of them wait for no forward.
        group = max(num_ranks, num_chunks)
        assert most[Kind.SEND_B] <= peaks[(rank - 1) % num_ranks] + 1 + (virtual_stages - 1) * group
        assert not kept[Kind.SEND_F]


def taken_by(receive, compute, departures):
    wanted = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
    if receive != compute._replace(kind=wanted.get(compute.kind)):
        return False
    departures.release(receive)
    return True
