"""Head and loss slice by slice against the same for a whole chunk: time of forward and backward, and memory.

Run with `python -m benchmarks.sliced_logits` or `make bench-logits`. One thread, thread CPU time, both ways interleaved
in one process, the best of several rounds; only the ratio counts. Both ways run the model's own code behind its trunk.
Memory is the most that torch's CPU allocator had handed out at once, beside weights, their gradients and the hidden
states. The whole chunk takes three times its logits, so that it is measured with fewer tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from benchmarks.pipeline_memory import peak_allocated
from lightning_seq1f1b.models.sliced_head import SlicedHead
from lightning_seq1f1b.models.split import cut
from lightning_seq1f1b.runtime.wide_gradients import WideGradients

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Head:
    """The head of a Llama, with hidden states at random.

    Args:
        vocab_size: logits of a token.
        hidden_size: width.
        dtype: of weights and hidden states.
    """

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=hidden_size,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
        model: LlamaForCausalLM = nn.Module.to(LlamaForCausalLM(config), dtype).train()
        WideGradients(model.parameters()).begin()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        split = cut(model, [0], [range(1)])
        self.head, self.dtype, self.config = SlicedHead(split, model.forward), dtype, config

    def inputs(self, tokens: int) -> tuple[Tensor, Any, dict[str, Tensor]]:
        """Hidden states, as the trunk gives them, and the arguments of the head."""
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(1, tokens, self.config.hidden_size, generator=generator).to(self.dtype).requires_grad_()
        labels = torch.randint(self.config.vocab_size, (1, tokens), generator=generator)
        arguments = {"labels": labels, "shift_labels": labels, "num_items_in_batch": torch.tensor(tokens)}
        return hidden, BaseModelOutputWithPast(last_hidden_state=hidden), arguments

    def whole(self, tokens: int) -> Callable[[], object]:
        """Forward and backward of a chunk at once."""
        _, output, arguments = self.inputs(tokens)
        return lambda: self.head.whole_loss(output, arguments).backward()

    def slices(self, tokens: int) -> Callable[[], object]:
        """The same slice by slice."""
        hidden, output, arguments = self.inputs(tokens)

        def run() -> None:
            hidden.grad = self.head.loss_and_gradient(output, arguments)[1]

        return run


def shortest(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Thread CPU seconds of each way, the best of so many rounds."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, run in ways.items():
            start = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def measure(
    dtype: str, vocab_size: int, hidden_size: int, compared_tokens: int, tokens: list[int], rounds: int
) -> dict[str, Any]:
    """Times at `compared_tokens`, and peaks in MiB: of both ways there, and of slices at each of `tokens`."""
    head = Head(vocab_size, hidden_size, DTYPES[dtype])
    seconds = shortest({"whole": head.whole(compared_tokens), "slices": head.slices(compared_tokens)}, rounds)
    peaks = {f"slices, {count} tokens": peak_allocated(head.slices(count)) / 2**20 for count in tokens}
    peaks[f"whole, {compared_tokens} tokens"] = peak_allocated(head.whole(compared_tokens)) / 2**20
    sizes = {"dtype": dtype, "vocabulary": vocab_size, "hidden": hidden_size, "compared_tokens": compared_tokens}
    return {**sizes, "seconds": seconds, "ratio": seconds["slices"] / seconds["whole"], "peak_mib": peaks}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128 * 1024, help="logits of a token")
    parser.add_argument("--hidden", type=int, default=256, help="width")
    parser.add_argument("--compared-tokens", type=int, default=1024, help="tokens at which the two ways are compared")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192], help="tokens for the memory of slices")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--json", type=Path, default=Path("build/bench/sliced_logits.json"), help="output file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for dtype in options.dtypes:
        line = measure(
            dtype, options.vocabulary, options.hidden, options.compared_tokens, options.tokens, options.rounds
        )
        rows.append(line)
        peaks = ", ".join(f"{name}: {size:.0f} MiB" for name, size in line["peak_mib"].items())
        print(f"{dtype:<9} slices take {line['ratio']:.2f} of the time of a whole chunk; {peaks}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(rows, indent=2) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
