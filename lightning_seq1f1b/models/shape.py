"""The sizes of a model, read from its config, for estimates of its cost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_seq1f1b.schedule.costs import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def model_shape(config: PreTrainedConfig) -> ModelShape:
    """Sizes of a causal language model from its config.

    The layers are counted on a model made from the config without memory. Where they all are as the sizes say, or no
    such model can be made, the sizes stand alone. Then, whether the MLP is gated is guessed: models with RMS norms have
    gated MLPs, those with layer norms plain ones.
    """
    from lightning_seq1f1b.models.layer_shapes import count_layers

    text: Any = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    experts = _number(text, "num_experts", "num_local_experts", "n_routed_experts")
    dense = _number(text, "intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner") or 4 * text.hidden_size
    expert_size = (_number(text, "moe_intermediate_size") or dense) if experts else 0
    sizes = ModelShape(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_heads=heads,
        num_kv_heads=_kv_heads(text, heads),
        head_dim=_number(text, "head_dim") or text.hidden_size // heads,
        intermediate_size=_shared_size(text, expert_size) if experts else dense,
        gated_mlp=getattr(text, "rms_norm_eps", None) is not None,
        vocab_size=text.vocab_size,
        sliding_window=_window(text),
        value_head_dim=_number(text, "v_head_dim") or None,
        num_experts=experts,
        experts_per_token=_number(text, "num_experts_per_tok", "moe_topk", "top_k") if experts else 0,
        expert_size=expert_size,
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
    )
    layers = count_layers(config, sizes)
    if layers and len(layers) != sizes.num_layers:  # some configs count attentions, of which a layer has two
        return replace(sizes, num_layers=len(layers), layers=layers)
    alike = all(layer == sizes.layer(0) for layer in layers)
    return sizes if alike else replace(sizes, layers=layers)


def _number(text: Any, *names: str) -> int:
    """The first of these that the config has as a number; 0 when it has none."""
    return next((value for name in names if isinstance(value := getattr(text, name, None), int)), 0)


def _kv_heads(text: Any, heads: int) -> int:
    """Falcon calls it `num_kv_heads`, or says `multi_query`; None or absence means as many as there are heads."""
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    return getattr(text, "num_key_value_heads", None) or getattr(text, "num_kv_heads", None) or heads


def _shared_size(text: Any, expert_size: int) -> int:
    """Inner width of the experts that every token is sent to."""
    return _number(text, "shared_expert_intermediate_size") or _number(text, "n_shared_experts") * expert_size


def _window(text: Any) -> int | None:
    window = getattr(text, "sliding_window", None)
    kinds = set(getattr(text, "layer_types", None) or ("sliding_attention",))
    return window if isinstance(window, int) and kinds == {"sliding_attention"} else None
