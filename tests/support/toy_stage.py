"""A small attention model cut into stages by hand, to test the runtime without a model library."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_seq1f1b.runtime.batching import Chunk, Microbatch
from lightning_seq1f1b.runtime.kv_buffer import KVBuffer
from lightning_seq1f1b.runtime.linear_layers import linear_layers
from lightning_seq1f1b.runtime.objective import Objective
from lightning_seq1f1b.runtime.summed_loss import SummedLoss

HIDDEN, VOCAB = 8, 11


class ToyLayer(nn.Module):
    """Single-head causal attention with a residual, [rows, tokens, HIDDEN]."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, hidden: Tensor, buffer: KVBuffer, start: int) -> Tensor:
        query = self.query(hidden)[:, None]
        keys, values = buffer.append(start, 0, self.key(hidden)[:, None], self.value(hidden)[:, None])
        tokens, prefix = query.shape[-2], keys.shape[-2]
        seen = torch.ones(tokens, prefix, dtype=torch.bool).tril(prefix - tokens)
        return hidden + F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)[:, 0]


class ToyState(SummedLoss):
    """The KV buffers of a microbatch's layers."""

    def __init__(self, buffers: list[KVBuffer]) -> None:
        super().__init__()
        self.buffers = buffers

    def carried(self, chunk: int, scale: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        return [], []

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()


class ToyStage(nn.Module):
    """Layers of one stage; the first also embeds, the last also scores. Implements `runtime.stage.Stage`."""

    def __init__(self, index: int, num_stages: int, num_layers: int) -> None:
        super().__init__()
        self.index, self.num_stages = index, num_stages
        self.embed = nn.Embedding(VOCAB, HIDDEN) if index == 0 else None
        self.layers = nn.ModuleList(ToyLayer() for _ in range(num_layers))
        self.head = nn.Linear(HIDDEN, VOCAB) if index == num_stages - 1 else None
        self.linears = linear_layers(self)

    @property
    def trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def open(self, microbatch: Microbatch, *, training: bool, objective: Objective | None = None) -> ToyState:
        return ToyState([KVBuffer(microbatch.length) for _ in self.layers])

    def forward(self, chunk: Chunk, hidden: Tensor | None, state: ToyState) -> Tensor:
        if self.embed is not None:
            hidden = self.embed(chunk.input_ids)
        for layer, buffer in zip(self.layers, state.buffers, strict=True):
            hidden = layer(hidden, buffer, chunk.span.start)
        if self.head is None:
            return hidden
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), chunk.labels.flatten(), reduction="sum")
        loss = loss / chunk.loss_denominator
        state.add_loss(loss)
        return loss


def toy_stages(num_stages: int, layers_per_stage: int = 1, dtype: torch.dtype = torch.float64) -> list[ToyStage]:
    """All stages of one model, the same weights at every call."""
    torch.manual_seed(0)
    return [ToyStage(index, num_stages, layers_per_stage).to(dtype) for index in range(num_stages)]
