"""What goes wrong in a training step ends all ranks with one error that names the cause."""

import traceback

import pytest
import torch
from support.fitting import TWO_STAGES, fit, rows
from support.processes import run_processes
from support.training import FineTune


class ReturnsNone(FineTune):
    """Forgets to return its loss."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


class Poisoned(FineTune):
    """One layer's backward gives NaN."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def configure_model(self):
        super().configure_model()
        self.model.model.layers[self.layer].mlp.register_forward_hook(poison)


def poison(mlp, args, output):
    return output + 0 * torch.sqrt(0 * output)


def error_of(rank, module, options):
    """The error as Python prints it, with what the strategy has added to it."""
    with pytest.raises(RuntimeError) as caught:
        fit(TWO_STAGES, module, rows(), **options)
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.behaviour(12)
def test_returning_none_is_the_same_error_on_all_ranks():
    for message in run_processes(error_of, 2, ReturnsNone(), {}, timeout_s=60):
        assert "Skipping the `training_step` by returning None in distributed training is not supported" in message


@pytest.mark.behaviour(26)
@pytest.mark.parametrize("layer", [0, 3])
def test_anomaly_detection_names_the_operation_on_all_ranks(layer):
    for message in run_processes(error_of, 2, Poisoned(layer), {"detect_anomaly": True}, timeout_s=60):
        assert "Function 'SqrtBackward0' returned nan values" in message
