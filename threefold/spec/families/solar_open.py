"""Solar Open: DeepSeek-V3's experts in every layer, with Llama's attention."""

from threefold.spec.family import BALANCED_SIGMOID, BASE, ROPE, Family, Fields, HfClass, Parts, published, tiny
from threefold.spec.hf_parts import check_whole_rotation, standard_parts


def _read(c: Fields, family: Family) -> Parts:
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
    read=_read,
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
