"""Makes a Hugging Face config.json for a model that was not imported: the inverse of `spec/hf.py`.

`write_hf` calls `hf_config_of`.
"""

from typing import Any

from threefold.engine.weights.families.config_keys import (
    CLASS_NAMES,
    CONFIG_KEYS,
    LAYER_TYPES,
    PARTIAL_ROTARY,
    group_limited_keys,
    scaling_keys,
)
from threefold.engine.weights.families.nemotron_config import nemotron_config
from threefold.spec.model import DeltaSpec, GqaSpec, IndexerSpec, MlaSpec, ModelSpec, MoeSpec, VisionSpec

HF_CLASSES = {
    **CLASS_NAMES,
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
_GROUP_LIMITED = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
_WITH_TEXT_CONFIG = ("gemma4", "qwen3_5_moe", "qwen3_vl_moe")
_WITH_DELTA = ("qwen3_next", "qwen3_5_moe")


def hf_config_of(spec: ModelSpec) -> dict[str, Any]:
    """The configuration from which `spec/hf.py` reads the same spec."""
    text = nemotron_config(spec) if spec.family == "nemotron_h" else _text_config(spec)
    if spec.vision is None:
        return {"architectures": [HF_CLASSES[text["model_type"]]], **text}
    return {
        "architectures": [HF_CLASSES[spec.family]],
        "model_type": spec.family,
        "tie_word_embeddings": spec.tied,
        "text_config": text,
        **_vision(spec.vision, spec.dim, spec.family),
    }


def _text_config(spec: ModelSpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": f"{spec.family}_text" if spec.family in _WITH_TEXT_CONFIG else spec.family,
        "hidden_size": spec.dim,
        "vocab_size": spec.vocab,
        "num_hidden_layers": spec.num_layers,
        "intermediate_size": spec.dense_dim,
        "rms_norm_eps": spec.norm_eps,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": spec.tied,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    attention = spec.attention
    assert attention is not None
    config |= _mla(attention) if isinstance(attention, MlaSpec) else _gqa(attention)
    config |= _rope(attention, partial=spec.family in (*_WITH_DELTA, *PARTIAL_ROTARY))
    if spec.family in CONFIG_KEYS:
        return config | CONFIG_KEYS[spec.family](spec)
    if spec.moe is not None:
        config |= _moe(spec, spec.moe)
    if spec.delta is not None:
        config |= _delta(spec.delta)
    if spec.local_attention is not None:
        config["sliding_window"] = spec.local_attention.window
    if spec.family in ("gpt_oss", *_WITH_DELTA):
        config["layer_types"] = [LAYER_TYPES[layer.mixer] for layer in spec.layers]
    if spec.family in _WITH_DELTA:  # the published name for it, which Megatron Bridge reads
        config["full_attention_interval"] = len(spec.pattern)
    if spec.mtp_layers or spec.family in _GROUP_LIMITED:
        config["num_nextn_predict_layers"] = spec.mtp_layers
    return config


def _gqa(spec: GqaSpec) -> dict[str, Any]:
    window = {} if spec.window is None else {"sliding_window": spec.window}
    return {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "attention_bias": spec.bias,
        **window,
    }


def _mla(spec: MlaSpec) -> dict[str, Any]:
    return {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_heads,
        "q_lora_rank": spec.q_rank,
        "kv_lora_rank": spec.kv_rank,
        "qk_nope_head_dim": spec.nope_dim,
        "qk_rope_head_dim": spec.rope_dim,
        "v_head_dim": spec.v_dim,
        "rope_interleave": spec.rope_pairs,
        **({} if spec.indexer is None else _indexer(spec.indexer)),
    }


def _indexer(spec: IndexerSpec) -> dict[str, Any]:
    # Megatron Bridge asks for the last one, which transformers takes for granted.
    turning = {"indexer_rope_interleave": True} if spec.rope_pairs else {}
    return {"index_n_heads": spec.num_heads, "index_head_dim": spec.head_dim, "index_topk": spec.top_k, **turning}


def _rope(spec: GqaSpec | MlaSpec, partial: bool) -> dict[str, Any]:
    """RoPE settings, twice: transformers 4 reads `rope_theta`, transformers 5 reads `rope_parameters`."""
    part = {"partial_rotary_factor": spec.rope_fraction} if partial and isinstance(spec, GqaSpec) else {}
    scaling = {"rope_type": "default"} if spec.rope_scaling is None else scaling_keys(spec.rope_scaling)
    if isinstance(spec, GqaSpec) and spec.rope_sections:
        scaling |= {"mrope_section": list(spec.rope_sections), "mrope_interleaved": True}
    config: dict[str, Any] = {
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_theta": spec.rope_theta, **scaling, **part},
        **part,
    }
    if spec.rope_scaling is not None:
        # The stated length is that of the context of training where a table has no other key for it.
        stretch = 1.0 if spec.rope_scaling.kind in ("linear", "dynamic", "ntk_alpha") else spec.rope_scaling.factor
        config["max_position_embeddings"] = int(stretch * spec.rope_scaling.original_len)
    return config


def _moe(spec: ModelSpec, moe: MoeSpec) -> dict[str, Any]:
    config: dict[str, Any] = {"num_experts_per_tok": moe.top_k}
    if spec.family in ("gpt_oss", "mixtral"):
        return {**config, "num_local_experts": moe.num_experts, "intermediate_size": moe.expert_dim}
    config |= {"moe_intermediate_size": moe.expert_dim, "norm_topk_prob": moe.norm_topk}
    if spec.family not in _GROUP_LIMITED:
        shared = {"shared_expert_intermediate_size": moe.shared_width} if spec.family in _WITH_DELTA else {}
        return {**config, "num_experts": moe.num_experts, **shared}
    # Of DeepSeek-V3's own config.json: transformers 5 takes them for granted, Megatron Bridge 0.3 does not.
    config = {**group_limited_keys(spec), "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    # transformers gives this family a second number of experts, which Megatron Bridge 0.5 reads.
    return {**config, "num_experts": moe.num_experts} if spec.family == "glm_moe_dsa" else config


def _delta(spec: DeltaSpec) -> dict[str, Any]:
    return {
        "linear_num_key_heads": spec.num_k_heads,
        "linear_num_value_heads": spec.num_v_heads,
        "linear_key_head_dim": spec.k_dim,
        "linear_value_head_dim": spec.v_dim,
        "linear_conv_kernel_dim": spec.conv,
    }


def _vision(spec: VisionSpec, dim: int, family: str) -> dict[str, Any]:
    """The encoder, and the ids of the tokens around pictures and in their place."""
    deepstack = {"deepstack_visual_indexes": list(spec.deepstack)} if family == "qwen3_vl_moe" else {}
    return {
        "vision_config": {
            "model_type": f"{family}_vision",
            "depth": spec.depth,
            "hidden_size": spec.dim,
            "intermediate_size": spec.mlp_dim,
            "num_heads": spec.num_heads,
            "patch_size": spec.patch,
            "temporal_patch_size": spec.temporal_patch,
            "spatial_merge_size": spec.merge,
            "num_position_embeddings": spec.num_positions,
            "out_hidden_size": dim,
            **deepstack,
        },
        "vision_start_token_id": spec.tokens.start,
        "vision_end_token_id": spec.tokens.end,
        "image_token_id": spec.tokens.image,
        "video_token_id": spec.tokens.video,
    }
