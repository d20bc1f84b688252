"""Sent tensors are let go of while the step runs, and never before their receiver has taken them."""

import itertools

import pytest

from lightning_seq1f1b.runtime.departures import Departures
from lightning_seq1f1b.schedule.actions import Kind
from lightning_seq1f1b.schedule.plan import make_plan
from lightning_seq1f1b.schedule.simulate import Costs, simulate

# That no departure is waited for too early is checked by every test that runs the executor on threads:
# an in-process departure raises when its message has not been taken.


class Sent:
    def __init__(self, kept):
        self.kept = kept
        kept.add(self)

    def wait(self):
        self.kept.remove(self)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "num_chunks"), list(itertools.product([2, 3, 4], [1, 6], [1, 3, 4]))
)
def test_no_more_is_kept_than_is_in_flight(num_stages, num_microbatches, num_chunks):
    plan = make_plan("seq1f1b", num_stages, num_microbatches, num_chunks)
    peaks = simulate(plan, Costs(1, 1, 1, num_chunks)).peak_units
    for rank, actions in enumerate(plan.actions):
        departures, kept = Departures(plan), {Kind.SEND_F: set(), Kind.SEND_B: set()}
        most = dict.fromkeys(kept, 0)
        received = []
        for action in actions:
            if action.kind in kept:
                departures.add(action, Sent(kept[action.kind]))
                most[action.kind] = max(most[action.kind], len(kept[action.kind]))
            elif action.computes:
                # The executor takes what a compute action needs right before it.
                received = [a for a in received if not (a.unit == action.unit and taken_by(a, action, departures))]
            else:
                received.append(action)
        assert most[Kind.SEND_F] <= peaks[rank]
        assert most[Kind.SEND_B] <= peaks[max(0, rank - 1)] + 1
        assert not kept[Kind.SEND_F]


def taken_by(receive, compute, departures):
    if (receive.kind is Kind.RECV_F) != (compute.kind is Kind.F):
        return False
    departures.release(receive)
    return True
