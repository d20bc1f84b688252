"""Parts of an optimizer, one on each rank, are one optimizer: their states merge, split and go on."""

import copy
import itertools

import pytest
import torch
from torch import nn

from lightning_seq1f1b.strategy.optimizers import keep_local, local_state, whole_state

SIZES = (3, 4, 5, 2)
STAGES = (("0.",), ("1.", "2."))
"""Prefixes of the parameters' names on each of two ranks."""


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(size, following) for size, following in itertools.pairwise(SIZES)))


def by_kind(model, named):
    """Matrices in one group and biases in another: names of both stages alternate in both groups."""
    groups = [[], []]
    for name, parameter in model.named_parameters():
        groups[parameter.ndim < 2].append((name, parameter) if named else parameter)
    return [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "lr": 0.5}]


OPTIMIZERS = {
    "all parameters": lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
    "two groups": lambda model: torch.optim.AdamW(by_kind(model, named=False)),
    "two named groups": lambda model: torch.optim.AdamW(by_kind(model, named=True)),
    "backwards": lambda model: torch.optim.SGD(list(model.parameters())[::-1], lr=0.1, momentum=0.9),
    "one stage only": lambda model: torch.optim.Adam(model[0].parameters()),
}


class Rank:
    """One rank: a copy of the model and of its optimizer, made over the whole model and cut to the rank's part."""

    def __init__(self, make, stage):
        self.model = make_model()
        self.optimizer = make(self.model)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.local = {name: p for p, name in names.items() if name.startswith(STAGES[stage])}
        self.whole = keep_local(self.optimizer, names, self.local)

    def entries(self):
        return {name: self.optimizer.state[p] for name, p in self.local.items() if p in self.optimizer.state}


def step(optimizer, model, seed):
    """One step with gradients that depend on the seed and on a parameter's name only."""
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * seed + number)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def merged(ranks):
    entries = {name: state for rank in ranks for name, state in rank.entries().items()}
    return whole_state(ranks[0].optimizer, ranks[0].whole, entries)


def assert_same_state(got, expected):
    assert got["param_groups"] == expected["param_groups"]
    assert list(got["state"]) == list(expected["state"])
    for number, entries in expected["state"].items():
        assert list(got["state"][number]) == list(entries)
        for key, value in entries.items():
            torch.testing.assert_close(got["state"][number][key], value, rtol=0, atol=0)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_parts_step_and_save_as_the_whole_optimizer(make):
    model = make_model()
    optimizer = make(model)
    ranks = [Rank(make, stage) for stage in range(len(STAGES))]
    for seed in range(3):
        step(optimizer, model, seed)
        for rank in ranks:
            step(rank.optimizer, rank.model, seed)
    assert_same_state(merged(ranks), optimizer.state_dict())
    expected = dict(model.named_parameters())
    for rank in ranks:
        for name, parameter in rank.local.items():
            assert torch.equal(parameter, expected[name])


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_saved_state_goes_on_in_parts(make):
    model = make_model()
    optimizer = make(model)
    step(optimizer, model, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    ranks = [Rank(make, stage) for stage in range(len(STAGES))]
    for rank in ranks:
        rank.model.load_state_dict(model.state_dict())
        rank.optimizer.load_state_dict(local_state(saved, rank.whole, rank.local))
        assert rank.optimizer.state.keys() <= set(rank.local.values())
    step(optimizer, model, 1)
    for rank in ranks:
        step(rank.optimizer, rank.model, 1)
    assert_same_state(merged(ranks), optimizer.state_dict())
    assert all(torch.equal(p, dict(model.named_parameters())[name]) for rank in ranks for name, p in rank.local.items())


def test_every_rank_has_all_groups_and_only_its_parameters():
    make = OPTIMIZERS["one stage only"]
    first, last = (Rank(make, stage) for stage in range(2))
    assert first.optimizer.param_groups[0]["params"] == list(first.local.values())
    assert last.optimizer.param_groups[0]["params"] == []
    last.optimizer.step()
    assert first.whole == last.whole
    assert first.whole[0].names == ["0.weight", "0.bias"]


def test_optimizer_made_before_the_cut_forgets_foreign_state():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer, model, 0)
    names = {parameter: name for name, parameter in model.named_parameters()}
    local = {name: parameter for parameter, name in names.items() if name.startswith(STAGES[1])}
    keep_local(optimizer, names, local)
    assert set(optimizer.state) == set(local.values())


def test_parameter_that_is_not_the_modules_is_refused():
    model, other = make_model(), nn.Linear(1, 1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="SGD holds a parameter that is not the module's"):
        keep_local(optimizer, names, {})


def test_state_of_other_groups_is_refused():
    rank = Rank(OPTIMIZERS["two groups"], 0)
    saved = OPTIMIZERS["all parameters"](make_model()).state_dict()
    with pytest.raises(ValueError, match=r"groups of \[6\] parameters, this one of \[3, 3\]"):
        local_state(saved, rank.whole, rank.local)
