"""Messages between processes keep their order in each direction, and the wire format survives the trip."""

import time

import pytest
import torch
import torch.distributed as dist
from support.processes import run_processes

from lightning_seq1f1b.runtime.topology import Lanes
from lightning_seq1f1b.runtime.transport import BACKWARD, FORWARD, InProcessTransport, Mailbox, ProcessTransport
from lightning_seq1f1b.runtime.wire import WireFormat


def made_transport(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    groups = {direction: Lanes(dist.new_group([0, 1]), dist.new_group([0, 1])) for direction in (FORWARD, BACKWARD)}
    return ProcessTransport((0, 1), groups, torch.device("cpu"))


def exchange(rank):
    """Every direction is used both ways, as with several stages on a rank, in an order of its own on either side.

    Returns what was received, and which way each group was used.
    """
    transport, other = made_transport(rank), 1 - rank
    ways, isend, irecv = set(), dist.isend, dist.irecv

    def noted_isend(tensor, destination, group):
        ways.add((group.group_name, rank, destination))
        return isend(tensor, destination, group=group)

    def noted_irecv(tensor, source, group):
        ways.add((group.group_name, source, rank))
        return irecv(tensor, source, group=group)

    dist.isend, dist.irecv = noted_isend, noted_irecv
    # Both send everything before either waits: a blocking send would never return.
    for index in range(20):
        for direction in (FORWARD, BACKWARD)[:: 1 if rank else -1]:
            transport.send(
                torch.full((1000,), float(index + 100 * rank) + 0.5 * (direction == FORWARD)), other, direction
            )
    received = {}
    for direction in (FORWARD, BACKWARD):
        arrivals = [transport.receive((1000,), torch.float32, other, direction) for _ in range(20)]
        received[direction] = [float(arrival.wait()[0]) for arrival in arrivals]
    transport.finish()
    return received, ways


def test_two_ranks_send_first_and_still_receive_in_order():
    results = run_processes(exchange, 2, timeout_s=60)
    # NCCL runs what one group does between two ranks one after another: no group may carry messages both ways.
    assert results[0][1] == results[1][1]
    assert len({group for group, _, _ in results[0][1]}) == len(results[0][1]) == 4
    for rank, (received, _) in enumerate(results):
        sent = [float(index + 100 * (1 - rank)) for index in range(20)]
        assert received == {FORWARD: [value + 0.5 for value in sent], BACKWARD: sent}


def look(rank):
    """Rank 1 looks at each arrival before the message is sent, and again until it is here."""
    transport = made_transport(rank)
    seen = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        if rank == 1:
            arrival = transport.receive((3, 100_000), dtype, 0, FORWARD)
            before = [arrival.is_here() for _ in range(100)]
            dist.barrier()
            deadline = time.monotonic() + 30
            while not arrival.is_here() and time.monotonic() < deadline:
                pass
            complete = bool((arrival._buffer == 7).all())
            seen.append((any(before), arrival.is_here(), complete, bool((arrival.wait() == 7).all())))
        else:
            dist.barrier()
            transport.send(torch.full((3, 100_000), 7, dtype=dtype), 1, FORWARD).wait()
    return seen


def test_an_arrival_tells_without_waiting_whether_it_is_here():
    assert run_processes(look, 2, timeout_s=60)[1] == [(False, True, True, True)] * 5


def test_in_process_arrivals_are_told_apart_by_their_number():
    mailbox = Mailbox()
    first, second = (InProcessTransport(mailbox, rank, timeout_s=0.05) for rank in range(2))
    arrivals = [second.receive((), torch.float32, 0, FORWARD) for _ in range(3)]
    first.send(torch.tensor(0.0), 1, FORWARD)
    assert [arrival.is_here() for arrival in arrivals] == [True, False, False]
    first.send(torch.tensor(1.0), 1, FORWARD)
    assert [arrival.is_here() for arrival in arrivals] == [True, True, False]
    assert [float(arrivals[number].wait()) for number in (1, 0)] == [1.0, 0.0]


def test_in_process_messages_are_checked_and_time_out():
    mailbox = Mailbox()
    first, second = (InProcessTransport(mailbox, rank, timeout_s=0.05) for rank in range(2))
    first.send(torch.zeros(2, 3), 1, FORWARD)
    with pytest.raises(RuntimeError, match="expected a message of"):
        second.receive((3, 2), torch.float32, 0, FORWARD).wait()
    with pytest.raises(TimeoutError):
        second.receive((2, 3), torch.float32, 0, FORWARD).wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_wire_format_round_trip(dtype):
    form = WireFormat.of(torch.zeros(2, 5, 7, dtype=dtype))
    assert WireFormat.decode(form.encode(torch.device("cpu"))) == form == WireFormat(7, dtype)


@pytest.mark.parametrize("hidden", [torch.zeros(2, 5), torch.zeros(2, 5, 7, dtype=torch.int64)])
def test_a_stage_must_hand_on_hidden_states(hidden):
    with pytest.raises(ValueError, match=r"\[rows, tokens, hidden size\]"):
        WireFormat.of(hidden)
