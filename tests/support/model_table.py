"""Judge every causal language model of the installed transformers and write docs/models.md: `make models`."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import transformers
from support.judging import CHUNK_LENGTHS, TOLERANCE, Verdict, judge
from support.staged_run import LAYER_RANGES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

TIMEOUT_S = 240.0
"""Seconds for one family, after which it is not judged."""

HEAD = """# Models

Every entry of `AutoModelForCausalLM` in transformers {version}, as `make models` found it. Each family is made tiny
({layers} layers, random weights) and run forward and backward in double precision twice: whole, on one device, and by
the code that runs in a pipeline, in {chunks} chunks of {lengths} tokens. *Exact* means that the loss and the gradient
of every parameter agree to {tolerance:.0e}.

- **exact**: cut into {stages} stages and chunks.
- **exact, one stage**: in chunks, but its layers cannot be told apart; `num_stages=1`, with the reason.
- **refused**: the strategy raises this error before training.
- **not judged**: no tiny model could be made, or one device cannot train it on text alone.

A sparse indexer is exact as long as no two of its scores are equal where it cuts off.

{counts}

| family | class | result | why |
| --- | --- | --- | --- |
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 1 when a family is wrong and not refused, which must not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="model types; all, and the page is written, when none is given")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args(arguments)
    verdicts, begin = [], time.monotonic()
    for verdict in judge_all(asked.families or list(NAMES), asked.processes):
        verdicts.append(verdict)
        print(f"{time.monotonic() - begin:5.0f} s  {verdict.family}: {verdict.result} {verdict.reason}", flush=True)
    counts = Counter(verdict.result for verdict in verdicts)
    print(dict(counts))
    if not asked.families:
        PAGE.write_text(page(verdicts))
    return 1 if counts["wrong"] else 0


def page(verdicts: Sequence[Verdict]) -> str:
    """The text of docs/models.md."""
    counts = Counter(verdict.result for verdict in verdicts)
    lines = []
    for each in sorted(verdicts, key=lambda verdict: verdict.family):
        why = " ".join(each.reason.split()).replace("|", "\\|")
        lines.append(f"| {each.family} | {each.model} | {each.result} | {why} |")
    head = HEAD.format(
        version=transformers.__version__,
        layers=LAYER_RANGES[-1].stop,
        chunks=len(CHUNK_LENGTHS),
        lengths=", ".join(map(str, CHUNK_LENGTHS)),
        stages=len(LAYER_RANGES),
        tolerance=TOLERANCE,
        counts="; ".join(f"{count} {result}" for result, count in counts.most_common()) + ".",
    )
    return head + "\n".join(lines) + "\n"


def judge_all(families: Sequence[str], processes: int) -> Iterator[Verdict]:
    """Verdicts in the order in which they are found, by several processes; one that hangs or dies is replaced."""
    waiting = list(reversed(families))
    idle = [_Judge() for _ in range(min(processes, len(families)))]
    busy: dict[Connection, _Judge] = {}
    while waiting or busy:
        while waiting and idle:
            judging = idle.pop()
            judging.ask(waiting.pop())
            busy[judging.connection] = judging
        ready = wait(list(busy), timeout=1.0)
        for connection, judging in list(busy.items()):
            verdict = judging.answer() if connection in ready else None
            if verdict is not None:
                idle.append(judging)
            elif connection in ready or judging.late():
                why = "its process died" if connection in ready else f"it took more than {TIMEOUT_S:.0f} s"
                verdict = Verdict(judging.family, NAMES[judging.family], "not judged", why)
                judging.process.kill()
                idle.append(_Judge())
            else:
                continue
            del busy[connection]
            yield verdict
    for judging in idle:
        judging.connection.close()


class _Judge:
    """A process that judges one family after the other, until its connection is closed."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(there,), daemon=True)
        self.process.start()
        there.close()
        self.family = ""
        self._asked = 0.0

    def ask(self, family: str) -> None:
        self.family, self._asked = family, time.monotonic()
        self.connection.send((family, NAMES[family]))

    def answer(self) -> Verdict | None:
        try:
            return self.connection.recv()
        except EOFError:
            return None

    def late(self) -> bool:
        return time.monotonic() - self._asked > TIMEOUT_S


def _work(connection: Connection) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    while True:
        try:
            family, model = connection.recv()
        except EOFError:
            return
        connection.send(judge(family, model))


if __name__ == "__main__":
    sys.exit(main())
