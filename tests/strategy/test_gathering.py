"""Entries of all stages arrive on the first one, whatever they are made of, and nothing on the others."""

import torch
import torch.distributed as dist
from support.processes import run_processes

from lightning_seq1f1b.strategy.gathering import gather_to_first


def entries(rank):
    """What a rank holds: layouts, dtypes and sizes that trip up a plain send, and what is no tensor."""
    values = torch.arange(12, dtype=torch.float64) + 100 * rank
    return {
        ("matrix", rank): values.view(3, 4).t(),
        ("scalar", rank): torch.tensor(rank, dtype=torch.float32),
        ("half", rank): values.to(torch.bfloat16),
        ("mask", rank): values > 100,
        ("empty", rank): torch.empty(0, 3),
        ("trained", rank): torch.ones(2).mul(rank).requires_grad_(),
        ("other", rank): {"rank": rank},
    }


def gather(rank, ranks):
    dist.init_process_group("gloo")
    group = dist.new_group(ranks)
    if rank not in ranks:
        return None
    gathered = gather_to_first(entries(rank), group, ranks)
    return gathered and {
        key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in gathered.items()
    }


def test_all_entries_arrive_on_the_first_rank():
    ranks = (1, 2, 3)
    nothing, gathered, *others = run_processes(gather, 4, ranks)
    assert nothing is None
    assert others == [None, None]
    expected = {key: value for rank in ranks for key, value in entries(rank).items()}
    assert gathered.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert gathered[key].dtype == value.dtype
            assert torch.equal(gathered[key], value.detach())
        else:
            assert gathered[key] == value


def test_one_rank_keeps_its_own():
    (gathered,) = run_processes(gather, 1, (0,))
    assert gathered.keys() == entries(0).keys()
