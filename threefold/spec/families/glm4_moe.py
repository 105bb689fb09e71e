"""DeepSeek-V3's experts with grouped-query attention: GLM-4.5, which rotates a part of each head, and Solar Open, which
has experts in every layer."""

from threefold.spec.family import (
    BALANCED_SIGMOID,
    BASE,
    ROPE,
    ROPE_AND_HEADS,
    Family,
    Fields,
    HfClass,
    Parts,
    decoder,
    published,
    tiny,
)
from threefold.spec.hf_parts import check_whole_rotation, standard_parts

TINY_GLM4_MOE = tiny(
    "tiny-glm4-moe",
    "glm4_moe",
    num_dense_layers=1,
    dense_dim=256,
    attention={"qk_norm": True, "bias": True, "out_bias": False, "rope_fraction": 0.5},
    moe={"num_shared": 1, "score": "sigmoid", "balance_bias": True, "scale": 2.5},
    mtp_layers=1,
)
GLM4_MOE = Family(
    "glm4_moe",
    {"glm4_moe": "Glm4MoeForCausalLM"},
    HfClass(
        defaults={
            **decoder(10944, 8, 131072),
            "rms_norm_eps": 1e-5,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "num_mtp_layers": 1,
        },
        aliases={"num_local_experts": "n_routed_experts", "num_nextn_predict_layers": "num_mtp_layers"},
        extra={**ROPE_AND_HEADS, "partial_rotary_factor": 0.5},
        places={"use_qk_norm": "attention.qk_norm"},
    ),
    facts={**BALANCED_SIGMOID, "attention.out_bias": False},
    rope={"partial": True},
    models=(
        published(
            "glm-4.5",
            (92, 5120, 96, 151552),
            {"intermediate_size": 12288, "head_dim": 128, "rope_theta": 1e6, "attention_bias": True},
            {"use_qk_norm": True, "moe_intermediate_size": 1536, "n_routed_experts": 160},
            {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
            source="zai-org/GLM-4.5 config.json",
            counts=(355e9, 32e9),
        ),
        published(
            "glm-4.5-air",
            (46, 4096, 96, 151552),
            {"head_dim": 128, "rope_theta": 1e6, "attention_bias": True},
            source="zai-org/GLM-4.5-Air config.json",
            counts=(106e9, 12e9),
        ),
        TINY_GLM4_MOE,
    ),
)


def _read_solar(c: Fields, family: Family) -> Parts:
    check_whole_rotation(c)
    return standard_parts(c, family)


SOLAR_OPEN = Family(
    "solar_open",
    {"solar_open": "SolarOpenForCausalLM"},
    HfClass(
        defaults={
            **BASE,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "attention_bias": False,
            "moe_intermediate_size": 1280,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
        },
        aliases={"num_local_experts": "n_routed_experts"},
        extra=ROPE,
        theta=1_000_000.0,
    ),
    facts={**BALANCED_SIGMOID, "attention.out_bias": False},
    read=_read_solar,
    models=(
        published(
            "solar-open-100b",
            (48, 4096, 64, 196608),
            source="transformers SolarOpenConfig defaults, for upstage/Solar-Open-100B",
        ),
        tiny(
            "tiny-solar-open",
            "solar_open",
            attention={"bias": True, "out_bias": False},
            moe={"num_shared": 1, "score": "sigmoid", "balance_bias": True, "scale": 2.5},
        ),
    ),
)
