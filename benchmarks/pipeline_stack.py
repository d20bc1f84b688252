"""The small Llama-like stack that the pipeline benchmark trains: one set of weights, cut into any number of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seq1f1b.ops.attention import chunk_attention
from lightning_seq1f1b.ops.kernel_attention import kernel_attention
from lightning_seq1f1b.ops.kernels import MERGED
from lightning_seq1f1b.ops.options import Options
from lightning_seq1f1b.runtime.batching import IGNORE_INDEX, Chunk, Microbatch
from lightning_seq1f1b.runtime.kv_buffer import KVBuffer, appended
from lightning_seq1f1b.runtime.linear_layers import LinearLayer, linear_layers
from lightning_seq1f1b.runtime.objective import Objective
from lightning_seq1f1b.runtime.summed_loss import SummedLoss
from lightning_seq1f1b.schedule.costs import ModelShape

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value), each [rows, heads, tokens, size] -> [rows, heads, tokens, size]."""

ATTENTIONS = ("plain", "native")
"""torch's own kernels, and the extension's."""


@dataclass(frozen=True)
class Sizes:
    """The dimensions of the stack, and how many tokens a row has."""

    hidden: int = 128
    heads: int = 2
    kv_heads: int = 1
    inner: int = 352
    vocabulary: int = 512
    layers: int = 4
    length: int = 8192

    def wider(self, hidden: int) -> Sizes:
        """The same proportions at another width, a multiple of this one: as many more heads, each as large."""
        times = hidden // self.hidden
        return replace(
            self, hidden=hidden, heads=times * self.heads, kv_heads=times * self.kv_heads, inner=times * self.inner
        )

    @property
    def head(self) -> int:
        """Entries of one head."""
        return self.hidden // self.heads

    @property
    def shape(self) -> ModelShape:
        """The same for the cost model, by which chunks are balanced."""
        return ModelShape(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head,
            intermediate_size=self.inner,
            gated_mlp=True,
            vocab_size=self.vocabulary,
        )


class Layer(nn.Module):
    """Pre-norm attention with grouped queries, and a gated MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, keys = sizes.hidden, sizes.kv_heads * sizes.head
        self.head, self.widths = sizes.head, (hidden, keys, keys)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, hidden + 2 * keys, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, hidden, bias=False)

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """[rows, tokens, hidden] -> the same."""
        parts = self.qkv(self.attention_norm(hidden)).split(self.widths, -1)
        query, key, value = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in parts)
        hidden = hidden + self.output(attend(query, key, value).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * up)


class Part(nn.Module):
    """One stage's layers, with the embedding on the first and the head on the last.

    The weights depend on their place in the whole stack alone, so every cut holds the same ones.

    Args:
        sizes: those of the whole stack.
        index: which stage.
        num_stages: stages of the whole stack; they divide its layers.
        dtype: of the weights.
    """

    def __init__(self, sizes: Sizes, index: int, num_stages: int, dtype: torch.dtype) -> None:
        super().__init__()
        count = sizes.layers // num_stages
        self.embedding = self.head = None
        if index == 0:
            torch.manual_seed(0)
            self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList()
        for number in range(index * count, (index + 1) * count):
            torch.manual_seed(2 + number)
            self.layers.append(Layer(sizes))
        if index == num_stages - 1:
            torch.manual_seed(1)
            logits = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
            self.head = nn.Sequential(nn.RMSNorm(sizes.hidden), logits)
        self.to(dtype)

    def forward(self, given: Tensor, attends: Sequence[Attend]) -> Tensor:
        """Token ids or hidden states -> hidden states or logits; an attention for each layer."""
        hidden = given if self.embedding is None else self.embedding(given)
        for layer, attend in zip(self.layers, attends, strict=True):
            hidden = layer(hidden, attend)
        return hidden if self.head is None else self.head(hidden)


class WholePart(nn.Module):
    """A part that is given whole sequences, as other pipelines give them."""

    def __init__(self, part: Part, attention: str) -> None:
        super().__init__()
        self.part = part
        self.attends = [whole_plain if attention == "plain" else whole_native] * len(part.layers)

    def forward(self, given: Tensor) -> Tensor:
        """Token ids or hidden states -> hidden states or logits."""
        return self.part(given, self.attends)


class Buffers(SummedLoss):
    """Keys and values of one microbatch on one stage. Implements `runtime.stage.MicrobatchState`."""

    def __init__(self, layers: list[KVBuffer]) -> None:
        super().__init__()
        self.layers = layers

    def carried(self, chunk: int, scale: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Nothing but keys and values passes from chunk to chunk."""
        return [], []

    def close(self) -> None:
        """Free the buffers."""
        for buffer in self.layers:
            buffer.close()


class ChunkedPart:
    """A part that is given chunks. Implements `runtime.stage.Stage`."""

    def __init__(self, part: Part, index: int, num_stages: int, attention: str) -> None:
        self.part, self.index, self.num_stages = part, index, num_stages
        self._attend = chunk_plain if attention == "plain" else chunk_native

    @property
    def linears(self) -> tuple[LinearLayer, ...]:
        """See `Stage.linears`."""
        return linear_layers(self.part)

    def open(self, microbatch: Microbatch, *, training: bool, objective: Objective | None = None) -> Buffers:
        """See `Stage.open`."""
        return Buffers([KVBuffer(microbatch.length) for _ in self.part.layers])

    def forward(self, chunk: Chunk, hidden: Tensor | None, state: Buffers) -> Tensor:
        """See `Stage.forward`."""

        def attention(buffer: KVBuffer) -> Attend:
            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                return self._attend(query, *buffer.append(chunk.span.start, 0, key, value))

            return attend

        output = self.part(chunk.input_ids if hidden is None else hidden, [attention(b) for b in state.layers])
        if self.index < self.num_stages - 1:
            return output
        loss = token_losses(output, chunk.labels) / chunk.loss_denominator
        state.add_loss(loss)
        return loss


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the supervised tokens' losses, in float32 at least; `labels` are already shifted."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def whole_plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over a whole sequence, by torch."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def whole_native(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over a whole sequence, by the extension."""
    return chunk_attention(query, key, value)


def chunk_plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of a chunk over its prefix and itself, by torch's kernels, as where the extension was not built."""
    options = Options(query.shape[-1] ** -0.5)
    return kernel_attention(query, key, value, None, MERGED, options, appended(key, value))


def chunk_native(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of a chunk over its prefix and itself, by the extension."""
    return chunk_attention(query, key, value, accumulators=appended(key, value))
