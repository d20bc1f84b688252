"""Perplexity over batches of unequal size is that of all tokens together."""

from __future__ import annotations

import torch
from torchmetrics.text import Perplexity as PerplexityFromLogits

from lightning_seq1f1b.cli.perplexity import Perplexity


def test_it_equals_the_perplexity_computed_from_all_logits():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = Perplexity(), PerplexityFromLogits(ignore_index=-100)
    for tokens in (3, 50, 7):
        logits = torch.randn(1, tokens, 11, generator=generator) * 3
        labels = torch.randint(0, 11, (1, tokens), generator=generator)
        labels[0, 0] = -100
        ours.update(torch.nn.functional.cross_entropy(logits[0], labels[0]), tokens - 1)
        theirs.update(logits, labels)
    torch.testing.assert_close(ours.compute(), theirs.compute())
