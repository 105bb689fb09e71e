"""The keys of config.json in which the families of `spec/hf_families` differ: the inverse of their readers.

`make_hf_config.py` adds them to what the configurations of all families have.
"""

from collections.abc import Callable
from typing import Any

from threefold.spec.model import GqaSpec, ModelSpec, MoeSpec

LAYER_TYPES = {"attention": "full_attention", "window": "sliding_attention", "delta": "linear_attention"}


def group_limited_keys(spec: ModelSpec) -> dict[str, Any]:
    """Experts as DeepSeek-V3 routes them."""
    moe = _moe(spec)
    return {
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_dim,
        "norm_topk_prob": moe.norm_topk,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.num_shared,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.scale,
        "first_k_dense_replace": spec.num_dense_layers,
    }


def _moe(spec: ModelSpec) -> MoeSpec:
    assert spec.moe is not None
    return spec.moe


def _attention(spec: ModelSpec) -> GqaSpec:
    assert isinstance(spec.attention, GqaSpec)
    return spec.attention


def _dots1(spec: ModelSpec) -> dict[str, Any]:
    window = spec.local_attention.window if spec.local_attention else None
    layers = {"layer_types": [LAYER_TYPES[layer.mixer] for layer in spec.layers], "sliding_window": window}
    return {**group_limited_keys(spec), **layers}


def _ernie4_5_moe(spec: ModelSpec) -> dict[str, Any]:
    moe = _moe(spec)
    return {
        "moe_num_experts": moe.num_experts,
        "moe_k": moe.top_k,
        "moe_intermediate_size": moe.expert_dim,
        "moe_num_shared_experts": moe.num_shared,
        "moe_layer_start_index": spec.num_dense_layers,
        "moe_layer_end_index": spec.num_layers - 1,
        "use_bias": False,
    }


def _glm4_moe(spec: ModelSpec) -> dict[str, Any]:
    own = {"use_qk_norm": _attention(spec).qk_norm, "num_nextn_predict_layers": spec.mtp_layers}
    return {**group_limited_keys(spec), **own}


def _granitemoe(spec: ModelSpec) -> dict[str, Any]:
    attention = _attention(spec)
    return {
        **_local_experts(spec),
        "attention_multiplier": attention.logit_scale,
        "residual_multiplier": attention.out_scale,
        "embedding_multiplier": spec.embed_scale,
        "logits_scaling": spec.logit_divisor,
    }


def _hunyuan_v1_moe(spec: ModelSpec) -> dict[str, Any]:
    moe = _moe(spec)
    return {"num_experts": moe.num_experts, "moe_topk": moe.top_k, "intermediate_size": moe.expert_dim}


def _local_experts(spec: ModelSpec) -> dict[str, Any]:
    moe = _moe(spec)
    return {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.expert_dim,
    }


def _olmoe(spec: ModelSpec) -> dict[str, Any]:
    moe = _moe(spec)
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.expert_dim,
        "norm_topk_prob": moe.norm_topk,
        "clip_qkv": _attention(spec).clip_qkv,
    }


def _phimoe(spec: ModelSpec) -> dict[str, Any]:
    keys = {**_local_experts(spec), "router_jitter_noise": _moe(spec).jitter, "lm_head_bias": spec.head_bias}
    scaling = _attention(spec).rope_scaling
    if scaling is None:
        return keys
    factors = {"short_factor": list(scaling.short_factor), "long_factor": list(scaling.long_factor)}
    mscales = {"short_mscale": scaling.attention_factor, "long_mscale": scaling.attention_factor}
    lengths = {"original_max_position_embeddings": scaling.original_len, "rope_theta": _attention(spec).rope_theta}
    return {**keys, "rope_parameters": {"rope_type": "longrope", **factors, **mscales, **lengths}}


def _qwen2_moe(spec: ModelSpec) -> dict[str, Any]:
    moe = _moe(spec)
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_dim,
        "shared_expert_intermediate_size": moe.shared_width,
        "norm_topk_prob": moe.norm_topk,
        "qkv_bias": _attention(spec).bias,
    }


CONFIG_KEYS: dict[str, Callable[[ModelSpec], dict[str, Any]]] = {
    "dots1": _dots1,
    "ernie4_5_moe": _ernie4_5_moe,
    "glm4_moe": _glm4_moe,
    "granitemoe": _granitemoe,
    "hunyuan_v1_moe": _hunyuan_v1_moe,
    "minimax_m2": _local_experts,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
}
# What config.json calls the class of a model.
CLASS_NAMES = {
    "dots1": "Dots1ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
}
PARTIAL_ROTARY = frozenset({"glm4_moe", "minimax_m2"})  # families that rotate a part of each head
