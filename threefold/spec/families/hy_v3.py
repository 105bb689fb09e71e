"""Hunyuan 3 (HY-V3): Qwen3's attention with MiniMax-M2's routing, a shared expert, and dense layers first."""

from threefold.spec.family import (
    BALANCED_SIGMOID,
    NO_DROPOUT,
    ROPE,
    Family,
    Fields,
    HfClass,
    Parts,
    WeightNames,
    decoder,
    published,
    tiny,
)
from threefold.spec.hf_parts import first_dense, standard_parts


def _read(c: Fields, family: Family) -> Parts:
    return {**standard_parts(c, family), "num_dense_layers": first_dense(c, default=1)}


HY_V3 = Family(
    "hy_v3",
    {"hy_v3": "HYV3ForCausalLM"},
    HfClass(
        defaults={
            **decoder(13312, 8, 131072),
            "initializer_range": 0.006,
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
            "mlp_layer_types": None,
        },
        only={**NO_DROPOUT, "mlp_bias": False},
        unread=frozenset({"enable_moe_fp32_combine"}),  # in which precision two outputs are added
        aliases={"num_local_experts": "num_experts"},
        extra=ROPE,
        theta=11_158_840.0,
        places={"num_shared_experts": "moe.num_shared", "router_scaling_factor": "moe.scale"},
    ),
    facts={**BALANCED_SIGMOID, "attention.qk_norm": True},
    read=_read,
    write=lambda spec: {
        "mlp_layer_types": [layer.ffn.replace("moe", "sparse") for layer in spec.layers],
        "first_k_dense_replace": spec.num_dense_layers,  # of the published file; Megatron Bridge reads it
    },
    names=WeightNames(
        router=("mlp.router.gate", "mlp.gate"),
        balance_bias=("mlp.expert_bias", "mlp.e_score_correction_bias"),
        shared=("mlp.shared_mlp", "mlp.shared_experts"),
    ),
    models=(
        published(
            "hy3-preview",
            (80, 4096, 64, 120832),
            source="transformers HYV3Config defaults, for tencent/Hy3-preview, without its MTP layer",
        ),
        tiny(
            "tiny-hy-v3",
            "hy_v3",
            num_dense_layers=1,
            dense_dim=256,
            attention={"qk_norm": True},
            moe={"num_shared": 1, "score": "sigmoid", "balance_bias": True, "scale": 2.5},
        ),
    ),
)
