"""Silence transformers' own look for padding in the tokens of a chunk."""

from __future__ import annotations

from torch import Tensor, nn


def silence_padding_check(model: nn.Module) -> None:
    """Turn the check off for good.

    It reads tokens back from the device in every chunk, and warns about padding whose mask was dropped on purpose (see
    `runtime.needs.Needs`).
    """
    for module in model.modules():
        if hasattr(type(module), "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _nothing  # type: ignore[assignment]


def _nothing(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    pass
