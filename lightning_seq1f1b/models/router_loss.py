"""The auxiliary loss of a mixture of experts' routers, put together from what every stage sees of every chunk.

It is a product of two means over all layers and all tokens of a batch, E sum_i f_i P_i, with f_i the share of tokens
that expert i was chosen for and P_i the mean probability the routers gave it (Fedus et al., "Switch Transformers",
2022, equations 4 to 6, as transformers' load_balancing_loss_func computes it). So no stage and no chunk has a loss of
its own that could be summed. But f is a count without a gradient, and complete before any backward of the batch
begins; with it, every chunk's part of the gradient follows from its own router logits alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FUNCTION = "load_balancing_loss_func"


@dataclass(frozen=True)
class RouterLoss:
    """What is known of a model's auxiliary loss.

    Attributes:
        coefficient: its factor in the model's loss.
        num_experts: of every router.
        top_k: experts that a token is sent to.
    """

    coefficient: float
    num_experts: int
    top_k: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> RouterLoss | None:
        """That of a model whose config asks for it by `output_router_logits`; None for others.

        Raises:
            ValueError: it is not the loss of transformers that this module can compute in pieces.
        """
        if not getattr(model.config.get_text_config(decoder=True), "output_router_logits", False):
            return None
        coefficient = getattr(model, "router_aux_loss_coef", getattr(model, "aux_loss_coef", None))
        sizes = [getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok")]
        function = getattr(sys.modules[type(model).__module__], _FUNCTION, None)
        if function is None or coefficient is None or None in sizes or not _recorders(model):
            raise ValueError(_refusal(model, f"it lacks one of {_FUNCTION}, router_aux_loss_coef, num_experts"))
        num_experts, top_k = (int(size) for size in sizes if size is not None)
        if not _is_known(function, num_experts, top_k):
            raise ValueError(_refusal(model, f"its {_FUNCTION} is not the usual one of transformers"))
        return cls(float(coefficient), num_experts, top_k)

    def gather(self, logits: Sequence[Tensor], real: Tensor | None) -> Tensor:
        """A chunk's part of the sums that the loss is made of, on one stage.

        Args:
            logits: of every router, [rows x tokens, experts].
            real: bool, [rows, tokens], false for padding, which does not count; None when all tokens do.

        Returns:
            [2 experts + 1], float64: the choices and the probabilities of each expert, and the tokens, summed up.
        """
        sums = torch.zeros(2 * self.num_experts + 1, dtype=torch.float64)
        for layer in logits:
            probabilities = layer.detach().softmax(dim=-1)
            chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(self.top_k, dim=-1).indices, 1.0)
            counted = torch.ones_like(probabilities[:, :1]) if real is None else real.reshape(-1, 1).to(chosen)
            parts = [(chosen * counted).double().sum(0), (probabilities * counted).double().sum(0)]
            sums = sums.to(layer.device) + torch.cat([*parts, counted.double().sum().reshape(1)])
        return sums

    def value(self, sums: Tensor) -> Tensor:
        """The loss times its coefficient, 0-d float64, from the sums over all stages and chunks."""
        chosen, probability, tokens = self._means(sums)
        return self.coefficient * self.num_experts * (chosen * probability).sum() * (tokens > 0)

    def gradient(self, logits: Tensor, real: Tensor | None, sums: Tensor, scale: Tensor | None = None) -> Tensor:
        """The gradient of `value` with respect to the logits of one router, in their dtype.

        Args:
            logits: [rows x tokens, experts].
            real: as for `gather`.
            sums: over all stages and chunks.
            scale: 0-d, a factor of the gradient; None for 1.
        """
        chosen, _, tokens = self._means(sums)
        factor = (self.coefficient * self.num_experts * chosen / tokens.clamp(min=1)).to(logits.device)
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)
        factor = factor.to(wide.dtype) if scale is None else factor.to(wide.dtype) * scale
        gradient = wide * (factor - (wide * factor).sum(-1, keepdim=True))
        if real is not None:
            gradient = gradient * real.reshape(-1, 1)
        return gradient.to(logits.dtype)

    def _means(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = sums[-1]
        chosen, probability = (sums[:-1] / tokens.clamp(min=1)).split(self.num_experts)
        return chosen, probability, tokens


class Routers:
    """The routers of the stages on one rank: keeps what they give, from the first chunk's forward to its backward.

    A batch is one microbatch here, so there is one set of sums at a time.

    Args:
        model: the model, cut or whole; hooks stay on its routers.
        loss: the model's.
    """

    def __init__(self, model: PreTrainedModel, loss: RouterLoss) -> None:
        self.loss = loss
        self.share: Callable[[Tensor], Callable[[], None]] = lambda sums: lambda: None
        """Starts to sum a tensor over all ranks of the pipeline, in place, and gives what waits for it."""
        self._wait: Callable[[], None] | None = None
        self._seen: list[Tensor] | None = None
        self._kept: dict[tuple[int, int], tuple[list[Tensor], Tensor | None]] = {}
        self._sums = self._nothing()
        for module, index in _routers(model):
            module.register_forward_hook(self._see(index))

    @contextmanager
    def watching(self, stage: int, chunk: int, real: Tensor | None, *, begins: bool) -> Iterator[None]:
        """While a stage runs a chunk's forward; when it is run again to recompute activations, nobody watches.

        Args:
            stage: index of the stage.
            chunk: index of the chunk.
            real: as for `RouterLoss.gather`.
            begins: whether the stage is the first one on this rank; with chunk 0 a batch begins.
        """
        if begins and chunk == 0:
            self._sums = self._nothing()
            self._kept.clear()
        logits: list[Tensor] = []
        self._seen = logits
        try:
            yield
        finally:
            self._seen = None
        sums = self.loss.gather(logits, real)
        self._sums = self._sums.to(sums.device) + sums
        if torch.is_grad_enabled():
            self._kept[stage, chunk] = (logits, real)

    def complete(self) -> None:
        """To be called when all forwards on this rank are through; does not wait for those of other ranks.

        Waiting here would be for ever: the other ranks still need what this one has not sent yet.
        """
        self._wait = self.share(self._sums)

    def value(self) -> Tensor:
        """The auxiliary loss times its coefficient, 0-d, after `complete`; waits for the other ranks' forwards."""
        return self.loss.value(self._total())

    def take(self, stage: int, chunk: int, scale: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """The router logits of a chunk with their gradients, after `complete`; forgotten then."""
        logits, real = self._kept.pop((stage, chunk))
        for each in logits:
            yield each, self.loss.gradient(each, real, self._total(), scale)

    def _total(self) -> Tensor:
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self._sums

    def _nothing(self) -> Tensor:
        return torch.zeros(2 * self.loss.num_experts + 1, dtype=torch.float64)

    def _see(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._seen is not None:
                logits = output[index] if isinstance(output, (tuple, list)) else output
                self._seen.append(logits.reshape(-1, logits.shape[-1]))

        return hook


def _recorders(model: PreTrainedModel) -> list[Any]:
    """How transformers records router logits: a module class, an index into its output, and part of its name."""
    for module in (model, *model.children()):
        found = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if found is not None:
            return list(found) if isinstance(found, (list, tuple)) else [found]
    return []


def _routers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, int]]:
    for recorder in _recorders(model):
        kind = getattr(recorder, "target_class", recorder)
        place = getattr(recorder, "layer_name", None)
        for name, module in model.named_modules():
            if isinstance(module, kind) and (place is None or f".{place.strip('.')}." in f".{name}."):
                yield module, getattr(recorder, "index", 0)


def _is_known(function: Callable[..., Tensor], num_experts: int, top_k: int) -> bool:
    """Whether a family's function gives what ours does, on a small example."""
    generator = torch.Generator().manual_seed(0)
    layers = tuple(torch.randn(6, num_experts, generator=generator) for _ in range(2))
    loss = RouterLoss(1.0, num_experts, top_k)
    for mask in (None, torch.tensor([[1, 1, 0], [1, 1, 1]])):
        try:
            theirs = function(layers, num_experts, top_k, mask)
        except Exception:  # another signature: not the function that is meant
            return False
        ours = loss.value(loss.gather(layers, None if mask is None else mask.bool()))
        if not torch.allclose(theirs.double(), ours, rtol=1e-4):
            return False
    return True


def _refusal(model: PreTrainedModel, reason: str) -> str:
    return (
        f"{type(model).__name__} has config.output_router_logits=True, whose auxiliary loss cannot be computed over "
        f"stages and chunks: {reason}. Set it to False."
    )
