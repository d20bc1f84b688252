"""Tiny configs of (almost) every causal language model of transformers, found from their default configs."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCAB_SIZE = 97
NUM_LAYERS = 4
WINDOW = 11

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_token_id": 1,
    "video_token_id": 1,
    "audio_token_id": 1,
    # decoders of encoder-decoder families, and names of old
    "decoder_layers": NUM_LAYERS,
    "encoder_layers": 1,
    "num_decoder_layers": NUM_LAYERS,
    "d_model": 32,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "ffn_dim": 48,
    "dff": 48,
    "ffn_hidden_size": 48,
    "dim_ff": 48,
    "dim_head": 8,
    "d_inner": 48,
    "d_head": 8,
    "n_ctx": 512,
    "max_target_positions": 512,
    "rotary_dim": 8,
    "embedding_size": 32,
    "input_embedding_size": 32,
    "output_embedding_size": 32,
    "word_embed_proj_dim": 32,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "zero_expert_num": 0,
    # latent attention, indexers, windows
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "o_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "local_attention": 2 * WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": 16,
    "keep_window_size": 16,
    "query_pre_attn_scalar": 8,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "rel_extent": 16,
    "dim_model_base": 32,
    # recurrent layers
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_dt_rank": 4,
    "ssm_state_size": 8,
    "state_size": 8,
    "chunk_size": 8,
    "time_step_rank": 4,
    "conv_dim": 32,
    "block_multiple_of": 8,
    "attention_hidden_size": 32,
    "lru_width": 32,
    "loop_gate_rank": 4,
    "hc_lowrank": 4,
    # embeddings of every layer's own
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
}
"""Sizes by the common names of transformers; a family takes those it knows."""

_NO_DROPOUT = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "residual_dropout",
    "hidden_dropout",
    "dropout",
    "activation_dropout",
    "layerdrop",
    "decoder_layerdrop",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "embed_dropout",
    "embedding_dropout",
    "emb_dropout",
    "embd_dropout",
    "ffn_dropout",
    "classifier_dropout",
    "router_jitter_noise",
    "input_jitter_noise",
    "dropout_p",
    "summary_last_dropout",
)

_FAMILY: dict[str, dict[str, Any]] = {
    "axk2": {"index_n_heads": 16},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 4,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v32": {"index_n_heads": 16},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "swa_q_lora_rank", "swa_kv_lora_rank"), 12),
        **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"), 8),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 8),
        **dict.fromkeys(("head_dim", "swa_head_dim", "index_n_heads"), 16),
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm_moe_dsa": {"index_n_heads": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hy_v4": {"index_n_heads": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "mixtral": {"sliding_window": None},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "ple_embed_dim": 32,
        "num_key_value_heads": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""What a family needs beside the sizes."""


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """Config of a 4-layer model of the family (a transformers model type), 32 wide, with 97 tokens and no dropout.

    Grouped-query attention (4 heads, 2 key-value heads) where the family knows it, windows of 11 tokens; every kind of
    layer in `layer_types` appears. The same goes for the parts of a config that are configs themselves.
    """
    cls = CONFIG_MAPPING[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = cls(**_arguments(cls, family, overrides))
    config.use_cache = False
    config._experts_implementation = "eager"  # the grouped kernels have no float64
    return config


def _arguments(cls: type[PreTrainedConfig], family: str, overrides: dict[str, Any]) -> dict[str, Any]:
    default = cls()
    values = {name: value for name, value in _SIZES.items() if _has(cls, default, name)}
    # Zero of the same type: some configs want an int.
    values |= {name: 0 * getattr(default, name) for name in _NO_DROPOUT if _has(cls, default, name)}
    if getattr(default, "is_decoder", None) is False:
        values["is_decoder"] = True  # of BERT and the like, which are causal only then
    kinds = list(dict.fromkeys(default.to_dict().get("layer_types") or ()))
    if kinds:
        count = overrides.get("num_hidden_layers", NUM_LAYERS)
        values["layer_types"] = (kinds * count)[:count]
    if _has(cls, default, "qk_rope_head_dim"):
        values.pop("num_key_value_heads", None)  # latent attention has as many as there are heads
        values["num_key_value_heads"] = 4
    for name, part in (getattr(cls, "sub_configs", None) or {}).items():
        inner = getattr(default, name, None)
        if isinstance(inner, PreTrainedConfig):
            values[name] = _part(part, inner)
    values.update(_FAMILY.get(family, {}))
    values.update(overrides)
    return values


def _part(cls: type[PreTrainedConfig], default: PreTrainedConfig) -> dict[str, Any]:
    family = default.model_type
    return type(default)(**_arguments(type(default), family, {})).to_dict()


def _has(cls: type[PreTrainedConfig], default: PreTrainedConfig, name: str) -> bool:
    try:
        value = getattr(default, name, None)
    except Exception:  # sizes that differ from layer to layer
        return False
    return value is not None and not isinstance(getattr(cls, name, None), property)
