"""Replicas that share an optimizer's state take the steps of one that holds all of it."""

import pytest
import torch
import torch.distributed as dist
from support.processes import run_processes
from torch import nn

from lightning_seq1f1b.strategy.optimizer_sharding import SharedSteps, check_separable, share_out
from lightning_seq1f1b.strategy.supported import check_optimizer

SIZES = (40, 24, 24, 16, 8)


def make_model(dtypes=(torch.float32, torch.bfloat16)):
    """Matrices of several sizes and two dtypes, the last of them frozen."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(size, 3).to(dtypes[index % len(dtypes)]) for index, size in enumerate(SIZES))
    model[-1].requires_grad_(False)
    return model


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "one by one": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),  # makes its state when it is made
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),  # looks at whole matrices
    "groups": lambda parameters: torch.optim.RMSprop(
        [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "momentum": 0.9}]
    ),
}


def shared_steps(rank):
    """Three steps of every optimizer: alone, shared, and shared with a closure; the differences of the weights."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    results = {}
    for name, make in OPTIMIZERS.items():
        models = [make_model() for _ in range(3)]
        optimizers = [make(list(model)) for model in models]
        owners = share_out(dict(models[0].named_parameters()), optimizers[:1], 2)
        shares = [
            SharedSteps(optimizer, {p: owners[key] for key, p in model.named_parameters()}, dist.group.WORLD)
            for model, optimizer in zip(models[1:], optimizers[1:], strict=True)
        ]
        for step in range(3):
            alone, shared, with_closure = optimizers

            def gradients(model, step=step):
                for number, parameter in enumerate(model):
                    generator = torch.Generator().manual_seed(10 * step + number)
                    if parameter.requires_grad:
                        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)

            def closure(model=models[2], gradients=gradients):
                assert all(p.grad is None for p in model)
                gradients(model)
                return torch.tensor(7.0)

            gradients(models[0])
            gradients(models[1])
            alone.step()
            shared.step()
            assert float(with_closure.step(closure)) == 7.0
            for model, optimizer in zip(models, optimizers, strict=True):
                assert all((p.grad is not None) == p.requires_grad for p in model)
                optimizer.zero_grad()
                assert all(p.grad is None for p in model)
        own = {key for key, owner in owners.items() if owner == rank}
        for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
            named = dict(model.named_parameters())
            held = {key for key, p in named.items() if p in optimizer.state}
            assert held == {key for key in own if named[key].requires_grad or name == "adagrad"}
        for share in shares:
            share.end()
        # Without sharing, a step of this rank alone waits for nobody.
        if rank == 0:
            gradients(models[1])
            optimizers[1].step()
        results[name] = [torch.equal(one, other) for one, other in zip(models[0], models[2], strict=True)]
    return results


def test_shared_steps_equal_those_of_one_optimizer():
    for results in run_processes(shared_steps, 2):
        assert results == {name: [True] * len(SIZES) for name in OPTIMIZERS}


def test_shares_have_about_the_same_size_and_frozen_parameters_do_not_weigh_in():
    parameters = {str(size): nn.Parameter(torch.zeros(size)) for size in (100, 60, 50, 40, 30, 20)}
    parameters["100"].requires_grad_(False)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    owners = share_out(parameters, [optimizer], 2)
    assert owners.keys() == parameters.keys()
    loads = [
        sum(int(name) for name, owner in owners.items() if owner == replica and name != "100") for replica in (0, 1)
    ]
    assert sum(loads) == 200
    assert abs(loads[0] - loads[1]) <= 20, "the smallest"


class AdamWScheduleFree(torch.optim.AdamW):
    """Stands for the class of that name in another package."""


class Prodigy(torch.optim.AdamW):
    """The same."""


def test_an_optimizer_whose_state_cannot_be_shared_is_refused_by_name():
    optimizer = AdamWScheduleFree([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match=r"shard_optimizer=True.* does not support AdamWScheduleFree: its train"):
        check_separable(optimizer)


@pytest.mark.behaviour(45)
def test_an_optimizer_that_sums_over_all_parameters_is_refused_by_name():
    optimizer = Prodigy([nn.Parameter(torch.zeros(1))])
    check_optimizer(optimizer, 1)
    with pytest.raises(ValueError, match="does not support Prodigy: each of its steps needs a sum"):
        check_optimizer(optimizer, 2)
