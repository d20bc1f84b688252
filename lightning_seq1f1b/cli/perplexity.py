"""Perplexity from losses, without logits: under a pipeline the logits stay on the last stage."""

from __future__ import annotations

from torch import Tensor
from torchmetrics import MeanMetric


class Perplexity(MeanMetric):
    """exp of the mean loss per supervised token. `update(loss, tokens)` takes a batch's mean loss and its token count.

    Batches of unequal size give the perplexity of all tokens together, which a mean of perplexities would not.
    """

    def compute(self) -> Tensor:
        """The perplexity of everything seen since the last reset, a scalar."""
        return super().compute().exp()
