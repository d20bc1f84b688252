"""Learn from preferred answers (DPO) with LoRA. The loss needs whole rows, which the pipeline never has at once.

    python examples/preferences.py --model PATH_OR_NAME --devices 2

The model without its adapters is the reference. With `--devices 1` it trains on one device and gets the same losses.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_seq1f1b import Seq1F1BStrategy, chunked_loss

BETA = 0.1


def answer_log_probability(logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Of a chunk: one value for each row, [rows], which `chunked_loss` adds up over the chunks."""
    losses = F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=-100, reduction="none").sum(1)
    return {"loss": losses.sum(), "log_probability": -losses}


class Prefer(L.LightningModule):
    """Direct preference optimization (arXiv 2305.18290) of a LoRA adapter."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_model(self) -> None:
        """Load the model and put adapters on its linear layers."""
        model = AutoModelForCausalLM.from_pretrained(self.name, dtype=torch.float32).train()
        self.model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Rows come in pairs, the chosen answer first."""
        pairs = len(batch["input_ids"]) // 2

        def dpo(sums: dict[str, Tensor], reference: Tensor) -> dict[str, Tensor]:
            reward = BETA * (sums["log_probability"] - reference)
            margin = reward[0::2] - reward[1::2]
            return {"loss": -F.logsigmoid(margin).sum() / pairs, "right": (margin > 0).sum() / pairs}

        with torch.no_grad(), self.model.disable_adapter():
            reference = chunked_loss(self.model, batch, answer_log_probability).metrics["log_probability"]
        batch = {**batch, "reference": reference}
        preferred = chunked_loss(self.model, batch, answer_log_probability, dpo, rows_together=2)
        self.log_dict({"train_loss": preferred.loss, **preferred.metrics}, prog_bar=True)
        return preferred.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Over the adapters alone."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def pairs(file: Path, name: str) -> DataLoader:
    """Batches of two pairs: four rows, padded on the right; only answers have labels."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows: list[dict[str, Tensor]] = []
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        prompt = tokenizer(entry["prompt"]).input_ids
        for answer in ("chosen", "rejected"):
            ids = torch.tensor(prompt + tokenizer(entry[answer], add_special_tokens=False).input_ids)
            labels = torch.where(torch.arange(len(ids)) < len(prompt), -100, ids)
            rows.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})

    def padded(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {key: pad_sequence([row[key] for row in batch], True, value) for key, value in fill.items()}

    return DataLoader(rows, batch_size=4, collate_fn=padded)  # type: ignore[arg-type]


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="build/demo/smollm2", help="a path or hub name")
    parser.add_argument("--file", type=Path, default=Path(__file__).with_name("preferences.jsonl"))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--max-epochs", type=int, default=3)
    options = parser.parse_args()

    L.seed_everything(0)  # every rank makes the same adapters
    # One row of chosen and one of rejected answer in every microbatch: `rows_together` sees to it.
    strategy = Seq1F1BStrategy(num_chunks=2)
    trainer = L.Trainer(devices=options.devices, strategy=strategy, max_epochs=options.max_epochs)
    trainer.fit(Prefer(options.model), pairs(options.file, options.model))
    trainer.print(f"train_loss of the last step: {trainer.callback_metrics['train_loss']:.6f}")


if __name__ == "__main__":
    main()
