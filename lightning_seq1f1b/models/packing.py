"""Rows packed with several documents: what a model cannot make of them, and whether a batch marks them soundly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_seq1f1b.models.rotary import longest_unchanged
from lightning_seq1f1b.runtime.batching import IGNORE_INDEX
from lightning_seq1f1b.runtime.documents import document_starts, padding_documents

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightning_seq1f1b.models.probe import Probe

BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that say again what position_ids say, as transformers' DataCollatorWithFlattening gives them."""

_ALONE = "give each document a row of its own, padded at the right with an attention_mask"


@dataclass(frozen=True)
class PackedRows:
    """Up to where a model computes the documents of a packed row as if each were alone.

    Attributes:
        refusal: why it never does; None when it does.
        longest: tokens that a document may have; None without a limit.
        counts_padding: whether its loss depends on padding that no mask marks.
    """

    refusal: str | None = None
    longest: int | None = None
    counts_padding: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel, learned: Probe) -> PackedRows:
        """That of a model of which `learned` is known."""
        routers = bool(getattr(model.config.get_text_config(decoder=True), "output_router_logits", False))
        return cls(learned.unpackable, longest_unchanged(model), routers)

    def check(self, batch: Mapping[str, Tensor], borders: Mapping[str, Any]) -> None:
        """Refuse packed rows that would not be computed like documents alone.

        Args:
            batch: `input_ids`, `labels`, and what else was given of `attention_mask` and `position_ids`.
            borders: what was given of `BORDERS`.

        Raises:
            ValueError: it says why, and what to do.
        """
        positions, mask = batch.get("position_ids"), batch.get("attention_mask")
        if borders and (positions is None or mask is not None):
            raise ValueError(
                f"{', '.join(sorted(borders))} without position_ids, or with an attention_mask: documents packed into "
                "one row are told by position_ids that restart, with no attention_mask beside them"
            )
        if positions is None:
            return
        rows, length = batch["input_ids"].shape
        starts = document_starts(positions).expand(rows, length)
        _check_agreement(starts, borders)
        inner = starts[:, 1:]
        if mask is not None:
            real = mask.bool()
            if bool((inner & real[:, 1:] & real[:, :-1]).any()):
                raise ValueError(
                    "position_ids restart between real tokens, which packs several documents into a row, but there is "
                    "an attention_mask, under which transformers does not keep documents apart. Leave attention_mask "
                    "out; padding at the end of a packed row has position 0 and no labels"
                )
            return
        if not bool(inner.any()):
            return
        if self.refusal is not None:
            raise ValueError(f"position_ids restart: rows packed with several documents. {self.refusal}; {_ALONE}")
        labels = batch.get("labels")
        if labels is not None and bool((labels[:, 1:][inner] != IGNORE_INDEX).any()):
            raise ValueError(
                "the first token of a document inside a packed row has a label: it would be predicted from the end of "
                f"the document before it. Set the labels of every document's first token to {IGNORE_INDEX}, as "
                "PackingCollator and transformers' DataCollatorWithFlattening do"
            )
        longest = int(positions.max()) + 1
        if self.longest is not None and longest > self.longest:
            raise ValueError(
                f"a packed row has a document that ends at position {longest}, but beyond {self.longest} tokens the "
                "model's rotary embeddings depend on the length of what they are given, which documents in one batch "
                f"cannot have each for itself; {_ALONE}"
            )
        if self.counts_padding and bool(padding_documents(starts).any()):
            raise ValueError(
                "a packed row ends with padding, which the routers' auxiliary loss counts where no attention_mask "
                "marks it. Use rows without padding (one row a batch), or set config.output_router_logits to False"
            )


ANY_PACKED = PackedRows()
"""Whatever is marked soundly."""


def _check_agreement(starts: Tensor, borders: Mapping[str, Any]) -> None:
    """Compare borders with the documents that begin at `starts`, [rows, length]; rows follow one another in them."""
    flat = starts.flatten()
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in borders:
            wanted = torch.cat([flat.nonzero().flatten(), torch.tensor([flat.numel()], device=flat.device)])
            given = torch.as_tensor(borders[name]).flatten().to(wanted)
            if not torch.equal(given, wanted):
                raise ValueError(
                    f"{name} says that documents begin at {given[:-1].tolist()} and end at {given[-1:].tolist()}, "
                    f"position_ids at {wanted[:-1].tolist()} and {wanted[-1:].tolist()}; they must agree"
                )
    if "seq_idx" in borders:
        given = torch.as_tensor(borders["seq_idx"]).to(starts.device)
        if given.shape != starts.shape or bool(((given.diff(dim=1) != 0) != starts[:, 1:]).any()):
            raise ValueError("seq_idx changes at other tokens than those where position_ids restart; they must agree")
