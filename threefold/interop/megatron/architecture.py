"""The shape of a model as settings of Megatron: what Megatron-LM must be told, and how a model is found from it.

Megatron Bridge reads the shape from a recipe or from a checkpoint. `pretrain_gpt.py` of Megatron-LM takes it as
arguments.
"""

from typing import Any

from threefold.interop.megatron.field_names import Settings
from threefold.spec.model import DeltaSpec, GqaSpec, MlaSpec, ModelSpec, MoeSpec
from threefold.spec.models import MODELS

# Families whose models the arguments of `pretrain_gpt.py` describe in full.
FAMILIES = ("deepseek_v3", "llama", "mixtral", "qwen3", "qwen3_moe", "qwen3_next")
# A plan may cut these; a model is found by the others, and by these where several are left.
_CUT = ("model.num_layers", "model.num_moe_experts", "model.vocab_size", "model.mtp_num_layers")
_FACTS = (
    "model.hidden_size",
    "model.num_attention_heads",
    "model.num_query_groups",
    "model.kv_channels",
    "model.ffn_hidden_size",
    "model.moe_ffn_hidden_size",
    "model.moe_router_topk",
    "model.moe_shared_expert_intermediate_size",
    "model.kv_lora_rank",
    "model.rotary_base",
)


def architecture(model: ModelSpec, seq_len: int) -> Settings | None:
    """Settings that describe a model to `pretrain_gpt.py`; None for a family that it cannot be told about."""
    if model.family not in FAMILIES or model.attention is None or model.vision is not None:
        return None
    settings: Settings = {
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.dim,
        "model.ffn_hidden_size": model.dense_dim or (model.moe.expert_dim if model.moe else 0),
        "model.num_attention_heads": model.attention.num_heads,
        "model.vocab_size": model.vocab,
        "model.make_vocab_size_divisible_by": model.vocab_multiple,
        "model.max_position_embeddings": seq_len,
        "model.normalization": "RMSNorm",
        "model.layernorm_epsilon": model.norm_eps,
        "model.position_embedding_type": "rope",
        "model.rotary_base": int(model.attention.rope_theta),
        "model.swiglu": True,
        "model.add_bias_linear": False,
        "model.untie_embeddings_and_output_weights": not model.tied,
        "model.attention_dropout": 0.0,
        "model.hidden_dropout": 0.0,
        "model.init_method_std": model.init_std,
    }
    settings |= _mla(model.attention) if isinstance(model.attention, MlaSpec) else _gqa(model.attention)
    if model.delta is not None:
        settings |= _delta(model.delta, model.pattern)
    if model.moe is not None:
        settings |= _moe(model.moe, model)
    return settings


def _gqa(attention: GqaSpec) -> Settings:
    settings: Settings = {
        "model.group_query_attention": True,
        "model.num_query_groups": attention.num_kv_heads,
        "model.kv_channels": attention.head_dim,
        "model.qk_layernorm": attention.qk_norm,
        "model.add_qkv_bias": attention.bias,
    }
    scaling, fraction = attention.rope_scaling, attention.rope_fraction
    if scaling is not None and scaling.kind == "proportional":
        fraction = scaling.turning_fraction
    if fraction != 1.0:
        settings["model.rotary_percent"] = fraction
    if attention.gated:
        settings["model.attention_output_gate"] = True
    if scaling is not None and scaling.kind == "llama3":
        settings["model.use_rope_scaling"] = True
        settings["model.rope_scaling_factor"] = scaling.factor
    return settings


def _mla(attention: MlaSpec) -> Settings:
    settings: Settings = {
        "model.multi_latent_attention": True,
        "model.kv_lora_rank": attention.kv_rank,
        "model.qk_head_dim": attention.nope_dim,
        "model.qk_pos_emb_head_dim": attention.rope_dim,
        "model.v_head_dim": attention.v_dim,
        "model.qk_layernorm": True,
        "model.rope_type": "yarn" if attention.rope_scaling else "rope",
    }
    if attention.q_rank is not None:
        settings["model.q_lora_rank"] = attention.q_rank
    if attention.rope_scaling is None:  # "apply_rope_fusion for MLA only works with YARN RoPE"
        settings["model.apply_rope_fusion"] = False
    if (scaling := attention.rope_scaling) is not None:
        settings["model.rotary_scaling_factor"] = scaling.factor
        for name in ("mscale", "mscale_all_dim"):
            if (value := getattr(scaling, name)) is not None:
                settings[f"model.{name}"] = value
    return settings


def _delta(delta: DeltaSpec, pattern: str) -> Settings:
    return {
        "model.experimental_attention_variant": "gated_delta_net",
        "model.linear_attention_freq": len(pattern),
        "model.linear_conv_kernel_dim": delta.conv,
        "model.linear_key_head_dim": delta.k_dim,
        "model.linear_value_head_dim": delta.v_dim,
        "model.linear_num_key_heads": delta.num_k_heads,
        "model.linear_num_value_heads": delta.num_v_heads,
    }


def _moe(moe: MoeSpec, model: ModelSpec) -> Settings:
    settings: Settings = {
        "model.num_moe_experts": moe.num_experts,
        "model.moe_ffn_hidden_size": moe.expert_dim,
        "model.moe_router_topk": moe.top_k,
        "model.moe_router_score_function": moe.score,
        "model.moe_router_pre_softmax": moe.score == "softmax" and not moe.norm_topk,
        "model.moe_grouped_gemm": True,
    }
    if moe.shared_width:
        settings["model.moe_shared_expert_intermediate_size"] = moe.shared_width
        settings["model.moe_shared_expert_gate"] = moe.shared_gate
    if moe.num_groups > 1:
        settings |= {"model.moe_router_num_groups": moe.num_groups, "model.moe_router_group_topk": moe.top_groups}
    if moe.scale != 1.0:
        settings["model.moe_router_topk_scaling_factor"] = moe.scale
    if moe.balance_bias:
        settings["model.moe_router_enable_expert_bias"] = True
    if model.num_dense_layers:
        dense = min(model.num_dense_layers, model.num_layers)
        settings["model.moe_layer_freq"] = (0,) * dense + (1,) * (model.num_layers - dense)
    return settings


def match_model(settings: Settings) -> str | None:
    """Our model with the shape that settings describe; where several have it, the one that needs the fewest cuts."""
    if "model.hidden_size" not in settings or "model.num_attention_heads" not in settings:
        return None
    return next(iter(like_models(settings)), None)


def like_models(settings: Settings) -> list[str]:
    """Our models that have every size that settings name, those that need the fewest cuts first."""
    if not any(settings.get(key) is not None for key in (*_FACTS, *_CUT)):
        return []
    alike: dict[str, int] = {}
    for name, model in MODELS.items():
        own = _facts(model)
        if all(settings.get(key) is None or own.get(key) == settings[key] for key in _FACTS):
            alike[name] = sum(settings.get(key, own.get(key)) == own.get(key) for key in _CUT)
    most = max(alike.values(), default=0)
    if not any(settings.get(key) is not None for key in _FACTS):  # what a plan may cut alone must fit
        alike = {name: count for name, count in alike.items() if count == most == len(_CUT)}
    return sorted(alike, key=lambda name: -alike[name])


def _facts(model: ModelSpec) -> Settings:
    shape: dict[str, Any] = architecture(model, 1) or {}
    return {**shape, "model.mtp_num_layers": model.mtp_layers or None}
