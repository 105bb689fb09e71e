"""Qwen2-MoE: biases on queries, keys and values, and a shared expert behind a gate."""

from threefold.spec.family import (
    BASE,
    NO_DROPOUT,
    ROPE_AND_HEADS,
    Family,
    Fields,
    HfClass,
    Parts,
    WeightNames,
    published,
    tiny,
)
from threefold.spec.hf_parts import check_full_attention, standard_parts


def _read(c: Fields, family: Family) -> Parts:
    if c["layer_types"] is not None:
        check_full_attention(c)
    parts, shared = standard_parts(c, family), c["shared_expert_intermediate_size"]
    parts["moe"] |= {"num_shared": 1 if shared else 0, "shared_gate": bool(shared)}
    return parts


TINY_QWEN2_MOE = tiny(
    "tiny-qwen2-moe",
    "qwen2_moe",
    attention={"bias": True, "out_bias": False},
    moe={"num_shared": 1, "shared_dim": 128, "shared_gate": True, "norm_topk": False},
)
QWEN2_MOE = Family(
    "qwen2_moe",
    {"qwen2_moe": "Qwen2MoeForCausalLM"},
    HfClass(
        defaults={
            **BASE,
            "intermediate_size": 5632,
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "qkv_bias": True,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "norm_topk_prob": False,
            "layer_types": None,
        },
        only={**NO_DROPOUT, "decoder_sparse_step": 1, "mlp_only_layers": None, "use_sliding_window": False},
        unread=frozenset({"sliding_window", "max_window_layers"}),  # read with use_sliding_window only
        extra=ROPE_AND_HEADS,
        places={"qkv_bias": "attention.bias", "shared_expert_intermediate_size": "moe.shared_dim"},
    ),
    facts={"attention.out_bias": False},
    read=_read,
    names=WeightNames(shared=("mlp.shared_expert",)),
    models=(
        published(
            "qwen2-57b-a14b",
            (28, 3584, 28, 151936),
            {"intermediate_size": 18944, "num_key_value_heads": 4, "rope_theta": 1e6},
            {"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "num_experts_per_tok": 8},
            {"num_experts": 64},
            source="Qwen/Qwen2-57B-A14B config.json",
            counts=(57.4e9, 14.2e9),
        ),
        TINY_QWEN2_MOE,
    ),
)
