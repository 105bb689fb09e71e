"""Hugging Face configurations of models small enough to train in a test, and the specs read from them."""

from typing import Any

import tiny_mixtures

from threefold.spec.hf import model_from_dict
from threefold.spec.model import ModelSpec

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 4.0, "beta_slow": 1.0}
_GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_BASE = {
    "hidden_size": 32,
    "vocab_size": 67,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_BASE, **_GQA, "intermediate_size": 48},
    "qwen3": {"model_type": "qwen3", **_BASE, **_GQA, "intermediate_size": 48, "attention_bias": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_BASE,
        **_GQA,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_BASE,
        **_GQA,
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_BASE,
        **_GQA,
        "intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "rope_parameters": {"rope_theta": 150.0, "truncate": False, **_YARN},
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_BASE,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_theta": 10000.0, "mscale": 0.7, "mscale_all_dim": 1.1, **_YARN},
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_BASE,
        **_GQA,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        **{name: value for name, value in _BASE.items() if name not in ("num_hidden_layers", "rms_norm_eps")},
        **_GQA,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "layer_norm_epsilon": 1e-5,
        "intermediate_size": 48,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 8,
        "mamba_head_dim": 6,
        "ssm_state_size": 8,
        "n_groups": 4,
        "conv_kernel": 4,
        "chunk_size": 8,
        "time_step_min": 0.01,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
}
# So many heads that no two keys have a score of zero: which of equals `topk` takes is not defined.
_SPARSE = {**CONFIGS["deepseek_v3"], "index_n_heads": 9, "index_head_dim": 8, "index_topk": 5}
CONFIGS["deepseek_v32"] = {**_SPARSE, "model_type": "deepseek_v32"}
CONFIGS["glm_moe_dsa"] = {
    **_SPARSE,
    "model_type": "glm_moe_dsa",
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# Sizes that no kernel likes, tied embeddings, and the settings the first set leaves out.
ODD: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 20, "vocab_size": 31, "tie_word_embeddings": True},
    "qwen3": {"hidden_size": 19, "head_dim": 6, "num_key_value_heads": 1},
    "qwen3_moe": {"moe_intermediate_size": 7, "hidden_size": 30, "norm_topk_prob": False, "tie_word_embeddings": True},
    "mixtral": {"intermediate_size": 13, "num_local_experts": 3, "sliding_window": 4, "num_key_value_heads": 4},
    "gpt_oss": {"intermediate_size": 9, "hidden_size": 18, "num_hidden_layers": 3, "tie_word_embeddings": True},
    "deepseek_v3": {
        "q_lora_rank": None,
        "hidden_size": 27,
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": False,
        "n_shared_experts": 1,
        "norm_topk_prob": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_next": {
        "hidden_size": 22,
        "linear_value_head_dim": 5,
        "moe_intermediate_size": 9,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "deepseek_v32": {"hidden_size": 27, "n_shared_experts": 1, "index_head_dim": 5, "index_topk": 4},
    "glm_moe_dsa": {"hidden_size": 27, "q_lora_rank": 9, "index_n_heads": 8, "index_topk": 3, "norm_topk_prob": False},
    "nemotron_h": {
        "hidden_size": 22,
        "mamba_num_heads": 6,
        "mamba_head_dim": 5,
        "ssm_state_size": 7,
        "n_groups": 2,
        "conv_kernel": 3,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 9,
        "norm_topk_prob": False,
        "layers_block_type": ["moe", "linear_attention", "linear_attention", "full_attention", "mlp"],
    },
}
FAMILIES = tuple(CONFIGS)


def config_of(family: str, odd: bool = False) -> dict[str, Any]:
    """The configuration of a family here or in `tiny_mixtures`."""
    plain, odds = {**CONFIGS, **tiny_mixtures.CONFIGS}, {**ODD, **tiny_mixtures.ODD}
    return {**plain[family], **(odds[family] if odd else {})}


def spec_of(family: str, odd: bool = False, **changes: Any) -> ModelSpec:
    return model_from_dict({**config_of(family, odd), **changes}, name=family, source="test")
