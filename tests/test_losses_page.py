"""The examples of docs/losses.md run, on one device."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_batch, tiny_model
from torchmetrics.text import Perplexity

PAGE = (Path(__file__).parents[1] / "docs" / "losses.md").read_text()

FURTHER = {
    "accumulated_step": {"tokens_in_window": 40},
    "weighted_step": {"is_answer": torch.ones(4, 12)},
    "distillation_step": {"teacher_logits": torch.randn(4, 12, 97)},
    "dpo_step": {"reference": torch.zeros(4)},
    "validation_step": {},
}


def names() -> dict[str, Any]:
    """What the blocks of the page define together."""
    defined: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(code, "losses.md", "exec"), defined)
    return defined


@pytest.mark.parametrize("step", FURTHER)
def test_an_example_runs(step: str) -> None:
    logged: dict[str, Any] = {}
    defined, model = names(), tiny_model("llama", torch.float32)
    model.loss_function = defined["smoothed"]
    module = SimpleNamespace(
        model=model,
        trainer=SimpleNamespace(accumulate_grad_batches=2),
        perplexity=Perplexity(ignore_index=-100),
        log=logged.__setitem__,
        log_dict=logged.update,
    )
    loss = defined[step](module, {**tiny_batch(4, 12), **FURTHER[step]}, 0)
    if step == "validation_step":
        assert float(logged["val_perplexity"].compute()) > 1
    else:
        loss.backward()
        assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
        assert sorted(logged) == {"distillation_step": ["train_loss", "z_loss"], "dpo_step": ["margin"]}.get(step, [])


def test_every_step_of_the_page_is_run() -> None:
    assert {name for name in names() if name.endswith("_step")} == set(FURTHER)
