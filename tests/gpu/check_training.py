"""Training on one GPU in one short run: equal to Lightning's own strategy, in every precision, without hidden waits.

    python tests/gpu/check_training.py --json build/gpu/training.json

1. One stage in chunks against `strategy="auto"` on the same device: losses and weights of a few steps, per precision.
2. Peak memory of both.
3. Waits of the host for the device in a step, which must not grow with the number of chunks.

It prints one line for each, and ends with status 1 where anything is wrong. `--device cpu` runs what needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_seq1f1b import Seq1F1BStrategy

TOLERANCES = {"32-true": 1e-4, "bf16-mixed": 2e-2, "bf16-true": 5e-2, "16-mixed": 5e-3}
"""Largest difference of a loss, relative to one device's, by precision."""

STEPS = 3


class FineTune(L.LightningModule):
    """Any causal language model; remembers its losses."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.losses = length, []

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
            config = LlamaConfig(
                **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=self.length
            )
            self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3)


def fit(strategy: Any, precision: str, device: str, length: int) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights and the peak of allocated bytes (0 on a CPU) of a short training."""
    rows = torch.randint(1000, (2 * STEPS, length), generator=torch.Generator().manual_seed(1))
    data = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=2)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        enable_model_summary=False,
        **quiet,
    )
    module = FineTune(length)
    trainer.fit(module, data)
    weights = {name: parameter.detach().float().cpu() for name, parameter in module.named_parameters()}
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return [float(loss) for loss in module.losses], weights, peak


def compare(precision: str, device: str, length: int) -> dict[str, Any]:
    """One stage in eight chunks beside the whole rows of Lightning's own strategy."""
    losses, weights, peak = fit(Seq1F1BStrategy(num_chunks=8), precision, device, length)
    expected_losses, expected_weights, expected_peak = fit("auto", precision, device, length)
    differences = [abs(one - other) / other for one, other in zip(losses, expected_losses, strict=True)]
    error = max(differences)
    moved = max(float((weights[name] - value).abs().max()) for name, value in expected_weights.items())
    right = len(losses) == STEPS and error <= TOLERANCES[precision]
    return {
        "check": precision, "right": right, "loss": error, "weights": moved, "peak": peak, "whole": expected_peak
    }  # fmt: skip


def waits(device: str, length: int, chunks: int) -> int:
    """How often torch says in a training that the host waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fit(Seq1F1BStrategy(num_chunks=chunks), "bf16-mixed", device, length)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in said)


def main() -> None:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--precisions", nargs="+", choices=list(TOLERANCES), default=list(TOLERANCES))
    parser.add_argument("--json", type=Path, help="where to write everything")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is visible to torch")
    results = [compare(precision, args.device, args.seq_len) for precision in args.precisions]
    if args.device == "cuda":
        few, many = (waits(args.device, args.seq_len, chunks) for chunks in (2, 16))
        results.append({"check": "waits", "right": few == many, "2 chunks": few, "16 chunks": many})
    for result in results:
        print(*(f"{key}: {value}" for key, value in result.items()), sep="   ")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1))
    sys.exit(0 if all(result["right"] for result in results) else 1)


if __name__ == "__main__":
    main()
