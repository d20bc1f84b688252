"""Sequence-level 1F1B pipeline parallelism for fine-tuning language models on long sequences with PyTorch Lightning.

Importing the package registers the strategy name "seq1f1b" with Lightning. It does not import torch or Lightning by
itself, so that planning a schedule starts at once and works without them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_seq1f1b.registration import register_when_lightning_loads

if TYPE_CHECKING:
    from lightning_seq1f1b.callbacks.pipeline_monitor import PipelineMonitor
    from lightning_seq1f1b.callbacks.sample_text import SampleText
    from lightning_seq1f1b.cli.causal_lm import CausalLM
    from lightning_seq1f1b.cli.documents import LongDocuments
    from lightning_seq1f1b.cli.packing import PackingCollator
    from lightning_seq1f1b.cli.perplexity import Perplexity
    from lightning_seq1f1b.losses import chunked_loss
    from lightning_seq1f1b.strategy.seq1f1b import Seq1F1BStrategy

__version__ = "0.1.0"
__all__ = [
    "CausalLM",
    "LongDocuments",
    "PackingCollator",
    "Perplexity",
    "PipelineMonitor",
    "SampleText",
    "Seq1F1BStrategy",
    "chunked_loss",
]

_HOMES = {
    "CausalLM": "lightning_seq1f1b.cli.causal_lm",
    "LongDocuments": "lightning_seq1f1b.cli.documents",
    "PackingCollator": "lightning_seq1f1b.cli.packing",
    "Perplexity": "lightning_seq1f1b.cli.perplexity",
    "PipelineMonitor": "lightning_seq1f1b.callbacks.pipeline_monitor",
    "SampleText": "lightning_seq1f1b.callbacks.sample_text",
    "Seq1F1BStrategy": "lightning_seq1f1b.strategy.seq1f1b",
    "chunked_loss": "lightning_seq1f1b.losses",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


register_when_lightning_loads()
