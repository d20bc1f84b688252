"""Fine-tune with a LightningModule of your own. The strategy is the only line that knows of the pipeline.

    python examples/own_module.py --model PATH_OR_NAME --files 'texts/*.txt' --devices 4

With `--devices 1` it trains on one device and gets the same losses.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from transformers import AutoModelForCausalLM

from lightning_seq1f1b import LongDocuments, Seq1F1BStrategy


class FineTune(L.LightningModule):
    """An ordinary module: nothing in it asks for a rank, and the loss is the real one on every rank."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_model(self) -> None:
        """Load the model."""
        self.model = AutoModelForCausalLM.from_pretrained(self.name, dtype=torch.float32).train()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Calling the model runs the whole pipelined step, forward and backward."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer over the module's parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="build/demo/smollm2", help="a path or hub name; `make demo` makes the default"
    )
    parser.add_argument("--files", default="build/demo/text/*.txt", help="text files to learn")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-chunks", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--max-steps", type=int, default=3)
    options = parser.parse_args()

    data = LongDocuments(options.files, options.model, options.sequence_length, batch_size=2)
    strategy = Seq1F1BStrategy(num_chunks=options.num_chunks)
    trainer = L.Trainer(devices=options.devices, strategy=strategy, max_steps=options.max_steps)
    trainer.fit(FineTune(options.model), data)
    trainer.print(f"train_loss of the last step: {trainer.callback_metrics['train_loss']:.6f}")


if __name__ == "__main__":
    main()
