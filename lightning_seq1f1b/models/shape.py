"""The sizes of a model, read from its config, for estimates of its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_seq1f1b.schedule.costs import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Sizes of a causal language model from its config.

    For a mixture of experts, the intermediate size is that of all experts one token is sent to. Whether the MLP is
    gated is guessed: models with RMS norms have gated MLPs, those with layer norms plain ones. A window counts only if
    every layer has it.
    """
    text: Any = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    return ModelShape(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_heads=heads,
        num_kv_heads=_kv_heads(text, heads),
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        intermediate_size=_intermediate_size(text),
        gated_mlp=getattr(text, "rms_norm_eps", None) is not None,
        vocab_size=text.vocab_size,
        sliding_window=_window(text),
    )


def _kv_heads(text: Any, heads: int) -> int:
    """Falcon calls it `num_kv_heads`, or says `multi_query`; None or absence means as many as there are heads."""
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    return getattr(text, "num_key_value_heads", None) or getattr(text, "num_kv_heads", None) or heads


def _intermediate_size(text: Any) -> int:
    dense = next(
        (
            int(getattr(text, name))
            for name in ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
            if isinstance(getattr(text, name, None), int)
        ),
        4 * text.hidden_size,
    )
    experts = getattr(text, "num_experts_per_tok", None)
    if not isinstance(experts, int):
        return dense
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return experts * int(getattr(text, "moe_intermediate_size", None) or dense) + int(shared)


def _window(text: Any) -> int | None:
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ("sliding_attention",))
    return window if isinstance(window, int) and kinds == {"sliding_attention"} else None
