"""GLM-4.5: DeepSeek-V3's experts, with grouped-query attention that rotates a part of each head."""

from threefold.spec.family import BALANCED_SIGMOID, ROPE_AND_HEADS, Family, HfClass, decoder, published, tiny

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
