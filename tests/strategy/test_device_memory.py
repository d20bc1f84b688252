"""Only a rank's own layers ever go to its device, so that the whole model may be larger than one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from support.fitting import TWO_STAGES, fit, rows
from support.pretrained import Pretrained, write_checkpoint
from support.processes import run_processes
from support.training import FineTune
from torch import nn

from lightning_seq1f1b import Seq1F1BStrategy

NUM_LAYERS = 8
BESIDE = ({"model.model.embed_tokens.weight"}, {"model.model.norm.weight", "model.lm_head.weight"})
"""Parameters beside the layers, by rank."""


class Watched:
    """A module that writes down the parameters it has when it is moved."""

    moved: list[set[str]]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self.moved.append({name for name, value in self.named_parameters() if not value.is_meta})
        return super().to(*args, **kwargs)


class Made(Watched, FineTune):
    """Makes the whole model."""


class Loaded(Watched, Pretrained):
    """Loads what the rank needs of a model."""


def moved(rank: int, checkpoint: Path) -> dict[str, list[set[str]]]:
    """What was moved in a fit of each module, in order."""
    modules = {"made": Made(num_hidden_layers=NUM_LAYERS), "loaded": Loaded(checkpoint)}
    for module in modules.values():
        module.moved = []
        fit(TWO_STAGES, module, rows(3), max_epochs=1)
    return {name: module.moved for name, module in modules.items()}


@pytest.fixture(scope="module")
def moved_by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[set[str]]]]:
    folder = tmp_path_factory.mktemp("model")
    return run_processes(moved, 2, write_checkpoint(folder, "llama", torch.float32, num_hidden_layers=NUM_LAYERS))


@pytest.mark.behaviour(37)
@pytest.mark.parametrize("module", ["made", "loaded"])
def test_only_a_ranks_own_layers_are_moved_to_its_device(moved_by_rank: Any, module: str) -> None:
    for rank, moves in enumerate(moved_by_rank):
        own = range(rank * NUM_LAYERS // 2, (rank + 1) * NUM_LAYERS // 2)
        assert moves[module]
        for names in moves[module]:
            assert {int(name.split(".")[3]) for name in names if ".layers." in name} == set(own)
            assert {name for name in names if ".layers." not in name} == BESIDE[rank]


@pytest.mark.behaviour(37)
def test_models_are_made_on_the_host_whatever_the_device_is() -> None:
    device = torch.device("meta")
    ours, usual = Seq1F1BStrategy(), DDPStrategy(parallel_devices=[device])
    ours.parallel_devices = [device]
    assert ours.root_device == usual.root_device == device
    with usual.tensor_init_context():
        assert nn.Linear(2, 2).weight.device == device
    with ours.tensor_init_context():
        assert nn.Linear(2, 2).weight.device.type == "cpu"
