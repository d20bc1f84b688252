"""What everything around the executor costs: Trainer, strategy, monitor and loggers, in relation to what it runs.

Run with `python -m benchmarks.overhead` (`make bench-overhead`). Two processes train a small Llama on rows of 4,096
tokens with the Trainer, `PipelineMonitor`, two loggers and the watch over failures. After every step of the Trainer the
same processes take one with the same model, batch and optimizer in which the executor runs by itself, on a batch that
was cut before. Two figures come of it:

- *outside*: CPU seconds, of all threads of both processes, that a step of the Trainer spends outside the executor and
  the optimizer's update, over those inside. Steady, also where other work shares the cores.
- *ratio*: a whole step of the Trainer over the step after it, in CPU seconds and by the clock. It has what tracing adds
  inside the executor, too, and the noise of two long measurements.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_seq1f1b import PipelineMonitor, Seq1F1BStrategy
from lightning_seq1f1b.runtime.batching import cut_groups
from lightning_seq1f1b.strategy.seq1f1b import Seq1F1BStrategy as Strategy

LIMIT = 0.02
"""The most that everything beyond the executor may add to a step."""

REPORT = Path("build/bench/overhead.json")
WARM_UP = 2
VOCABULARY = 512


@dataclass
class Taken:
    """Seconds of steps on one rank: on the wall, and of the CPU in all threads."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        """One step."""
        self.wall.append(stop[0] - start[0])
        self.cpu.append(stop[1] - start[1])


def now() -> tuple[float, float]:
    """Wall clock and CPU time."""
    return time.perf_counter(), time.process_time()


class FineTune(L.LightningModule):
    """An ordinary module that logs its loss at every step.

    Args:
        hidden: width of the model.
        layers: of the model.
        length: tokens of a row.
    """

    def __init__(self, hidden: int, layers: int, length: int) -> None:
        super().__init__()
        self.config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            intermediate_size=11 * hidden // 4,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 128),
            max_position_embeddings=length,
        )

    def configure_model(self) -> None:
        """Make the model."""
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            self.model = AutoModelForCausalLM.from_config(self.config).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model's loss."""
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Batches(Dataset[dict[str, Tensor]]):
    """The same batch again and again.

    Args:
        batch: the batch.
        count: how often.
    """

    def __init__(self, batch: dict[str, Tensor], count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        """How often."""
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """The batch."""
        if index >= self._count:
            raise IndexError(index)
        return self._batch


class TakingTurns(Callback):
    """Takes a step with the executor alone after every step of the Trainer, and times both.

    It stands last among the callbacks: what the Trainer does after it, loggers above all, is part of the next step.
    """

    def __init__(self) -> None:
        self.whole, self.inside, self.alone, self.update = Taken(), Taken(), Taken(), Taken()
        self._prepared: tuple[Any, ...] | None = None
        self._run: Any = None
        self._began: tuple[float, float] | None = None
        self._inside: tuple[tuple[float, float], tuple[float, float]] | None = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The Trainer's step is over, but for its loggers."""
        strategy, ended = trainer.strategy, now()
        assert isinstance(strategy, Strategy)
        warm = batch_idx >= WARM_UP
        if warm and self._began is not None and self._inside is not None:
            self.whole.add(self._began, ended)
            self.inside.add(*self._inside)
        plan, microbatches = self._prepare(strategy, batch)
        optimizer = strategy.optimizers[0]
        strategy.barrier()
        began = now()
        self._run(plan, microbatches)
        computed = now()
        optimizer.step()
        optimizer.zero_grad()
        if warm:
            self.alone.add(began, now())
            self.update.add(computed, now())
        strategy.barrier()
        self._began = now()

    def _prepare(self, strategy: Strategy, batch: dict[str, Tensor]) -> tuple[Any, ...]:
        """The plan and the microbatches, made once; from then on the executor is timed in the Trainer's steps."""
        pipeline = strategy._pipeline
        assert pipeline is not None
        if self._prepared is None:
            groups = pipeline.cutting.groups(batch)
            ranks = strategy.topology.num_stages
            spans = pipeline.cutting.spans_of(groups, ranks, pipeline.shape)
            plan = pipeline.cutting.plan(tuple(map(len, spans)), ranks, training=True)
            self._prepared = plan, cut_groups(batch, groups, spans)
            self._run = run = pipeline.executor.run

            def timed(*args: Any) -> Any:
                began = now()
                result = run(*args)
                self._inside = began, now()
                return result

            pipeline.executor.run = timed  # type: ignore[assignment,method-assign]  # to time it
        return self._prepared


def ratios(ranks: Sequence[Mapping[str, Taken]]) -> dict[str, list[float]]:
    """What everything beyond the executor adds, step by step, from what both ranks have timed."""

    def cpu(name: str) -> list[float]:
        return [sum(steps) for steps in zip(*(rank[name].cpu for rank in ranks), strict=True)]

    whole, alone, update = cpu("whole"), cpu("alone"), median(cpu("update"))
    inside = [seconds + update for seconds in cpu("inside")]
    clock = zip(ranks[0]["whole"].wall, ranks[0]["alone"].wall, strict=True)
    return {
        "outside": [a / b - 1 for a, b in zip(whole, inside, strict=True)],
        "ratio_cpu": [a / b - 1 for a, b in zip(whole, alone, strict=True)],
        "ratio_wall": [a / b - 1 for a, b in clock],
    }


def spread(values: Sequence[float]) -> str:
    """Median and quartiles."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    return f"{median(ordered):+.2%} (quartiles {low:+.2%} to {high:+.2%})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run it, print the result and write it to `build/bench/overhead.json`; 1 where it is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="steps of each kind (12)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row (4096)")
    parser.add_argument("--rows", type=int, default=2, help="rows of a batch, each a microbatch (2)")
    parser.add_argument("--chunks", type=int, default=4, help="chunks of a row (4)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (256)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model (4)")
    parser.add_argument("--log-every", type=int, default=1, help="steps from report to report (1)")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (asked.rows, asked.length), generator=generator)
    batches = Batches({"input_ids": ids, "labels": ids}, asked.rounds + WARM_UP)
    turns, logs = TakingTurns(), gettempdir()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=Seq1F1BStrategy(num_chunks=asked.chunks),
        callbacks=[PipelineMonitor(), turns],
        logger=[CSVLogger(logs, "overhead"), TensorBoardLogger(logs, "overhead")],
        log_every_n_steps=asked.log_every,
        max_epochs=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        gradient_clip_val=None,
    )
    trainer.fit(FineTune(asked.hidden, asked.layers, asked.length), DataLoader(batches, batch_size=None))
    strategy = trainer.strategy
    assert isinstance(strategy, Strategy)
    ranks = strategy.gather_over_stages(
        {"whole": turns.whole, "inside": turns.inside, "alone": turns.alone, "update": turns.update}
    )
    if trainer.global_rank > 0:
        return 0
    found = ratios(ranks)
    wall, cpu = median(turns.alone.wall), sum(median(rank["alone"].cpu) for rank in ranks)
    print(f"a step with the executor alone: {wall:.2f} s by the clock, {cpu:.2f} CPU seconds of both ranks")
    print(f"outside the executor, of what is inside: {spread(found['outside'])} of CPU time")
    print(f"a whole step against one with the executor alone: {spread(found['ratio_cpu'])} of CPU time, ", end="")
    print(f"{spread(found['ratio_wall'])} by the clock")
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    steps = [{name: asdict(taken) for name, taken in rank.items()} for rank in ranks]
    REPORT.write_text(json.dumps({"asked": vars(asked), "ratios": found, "ranks": steps}, indent=1))
    return int(median(found["outside"]) > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
