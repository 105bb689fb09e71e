"""The keys of config.json in which the families of `spec/hf_families` differ: the inverse of their readers.

`make_hf_config.py` adds them to what the configurations of all families have.
"""

from collections.abc import Callable
from typing import Any

from threefold.spec.model import GqaSpec, ModelSpec, MoeSpec, RopeScaling

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


def scaling_keys(spec: RopeScaling) -> dict[str, Any]:
    """A rotary scaling as `rope_parameters` has it."""
    config: dict[str, Any] = {"rope_type": spec.kind, "factor": spec.factor}
    if spec.mscale_all_dim is not None:
        config["mscale_all_dim"] = spec.mscale_all_dim
    if spec.kind == "ntk_alpha":
        return {**config, "rope_type": "dynamic", "factor": 1.0, "alpha": spec.factor}
    if spec.kind in ("linear", "dynamic"):
        return config
    config["original_max_position_embeddings"] = spec.original_len
    if spec.kind == "longrope":
        config |= {"short_factor": list(spec.short_factor), "long_factor": list(spec.long_factor)}
        return config if spec.attention_factor is None else {**config, "attention_factor": spec.attention_factor}
    if spec.kind == "llama3":
        return {**config, "low_freq_factor": spec.low_freq_factor, "high_freq_factor": spec.high_freq_factor}
    optional = {"attention_factor": spec.attention_factor, "mscale": spec.mscale}
    return {
        **config,
        "beta_fast": spec.beta_fast,
        "beta_slow": spec.beta_slow,
        "truncate": spec.truncate,
        **{name: value for name, value in optional.items() if value is not None},
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


def _gemma4(spec: ModelSpec) -> dict[str, Any]:
    moe, full, local = _moe(spec), _attention(spec), spec.local_attention
    assert local is not None
    sizes = {"head_dim": full.head_dim, "num_key_value_heads": full.num_kv_heads}
    layer_types = [LAYER_TYPES[layer.mixer] for layer in spec.layers]
    globals_ = [number for number, kind in enumerate(layer_types) if kind == "full_attention"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": layer_types,
        "num_key_value_heads": local.num_kv_heads,
        "head_dim": local.head_dim,
        "per_layer_config": {str(number): sizes for number in globals_},
        "attention_k_eq_v": full.shared_kv,
        "sliding_window": local.window,
        "rope_parameters": {"full_attention": _layer_rope(full), "sliding_attention": _layer_rope(local)},
        "final_logit_softcapping": spec.logit_softcap,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": moe.num_experts,
        "top_k_experts": moe.top_k,
        "moe_intermediate_size": moe.expert_dim,
        "intermediate_size": moe.shared_width,
    }


def _layer_rope(attention: GqaSpec) -> dict[str, Any]:
    """The rotary positions of Gemma's layers of one type."""
    scaling, theta = attention.rope_scaling, {"rope_theta": attention.rope_theta}
    if scaling is None:
        return {"rope_type": "default", **theta}
    if scaling.kind == "proportional":
        part = {"partial_rotary_factor": scaling.turning_fraction, "factor": scaling.factor}
        return {"rope_type": "proportional", **part, **theta}
    return {**scaling_keys(scaling), **theta}


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
    "gemma4": _gemma4,
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
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
}
PARTIAL_ROTARY = frozenset({"glm4_moe", "minimax_m2"})  # families that rotate a part of each head
