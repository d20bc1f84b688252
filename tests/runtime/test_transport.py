"""Messages between processes keep their order in each direction, and the wire format survives the trip."""

import pytest
import torch
import torch.distributed as dist
from support.processes import run_processes

from lightning_seq1f1b.runtime.transport import BACKWARD, FORWARD, InProcessTransport, Mailbox, ProcessTransport
from lightning_seq1f1b.runtime.wire import WireFormat


def exchange(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    groups = {FORWARD: dist.new_group([0, 1]), BACKWARD: dist.new_group([0, 1])}
    transport = ProcessTransport((0, 1), groups, torch.device("cpu"))
    other, out, back = 1 - rank, (FORWARD, BACKWARD)[rank], (BACKWARD, FORWARD)[rank]
    # Both send everything before either waits: a blocking send would never return.
    for index in range(20):
        transport.send(torch.full((1000,), float(index + 100 * rank)), other, out)
    arrivals = [transport.receive((1000,), torch.float32, other, back) for _ in range(20)]
    received = [float(arrival.wait()[0]) for arrival in arrivals]
    transport.finish()
    return received


def test_two_ranks_send_first_and_still_receive_in_order():
    results = run_processes(exchange, 2, timeout_s=60)
    assert results[0] == [float(index + 100) for index in range(20)]
    assert results[1] == [float(index) for index in range(20)]


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
