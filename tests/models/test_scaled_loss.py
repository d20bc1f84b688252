"""A loss scale multiplies all gradients from the start of each backward; powers of two change nothing else."""

from __future__ import annotations

import pytest
import torch
from support.float64 import float64_throughout
from support.staged_run import make_stages, run_stages
from support.tiny_models import VOCAB_SIZE, tiny_batch, tiny_model

from lightning_seq1f1b.schedule import logits

SCALE = torch.tensor(2.0**12)


@pytest.mark.parametrize("sliced", [False, True], ids=["whole head", "sliced head"])
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("qwen3_next", {}), ("mixtral", {"output_router_logits": True, "router_jitter_noise": 0.0})],
    ids=["attention", "recurrence", "routers"],
)
def test_gradients_are_scaled(
    family: str, options: dict[str, object], sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sliced:
        monkeypatch.setattr(logits, "SLICED_FROM", 0.0)
        monkeypatch.setattr(logits, "CPU_SLICE", 4.0 * 4 * 2 * VOCAB_SIZE)
    model, batch = tiny_model(family, **options), tiny_batch()
    with float64_throughout():
        plain, scaled = (run_stages(make_stages(model, [range(4)]), batch, scale=scale) for scale in (None, SCALE))
    assert scaled.loss == plain.loss
    compared = 0
    for name, gradient in plain.gradients.items():
        if gradient is not None:
            torch.testing.assert_close(
                scaled.gradients[name], SCALE.double() * gradient, rtol=1e-10, atol=1e-12, msg=name
            )
            compared += 1
    assert compared
